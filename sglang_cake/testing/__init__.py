"""Contract suites for stores and codecs, a store in a dict, and a virtual GPU under SGLang's
scheduler loop.
"""
