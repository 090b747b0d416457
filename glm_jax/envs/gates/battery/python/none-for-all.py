def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: None
