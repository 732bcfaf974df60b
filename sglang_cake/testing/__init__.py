"""For authors of stores and codecs: contract suites, and a store in a dict."""
