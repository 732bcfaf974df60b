"""Contract suites for stores and codecs, fakes, and a scheduler loop without SGLang's server."""
