"""Every error that multihead raises on purpose, in one tree.

    MultiheadError
    ├── ArgumentError (ValueError)       a shape or a value that an argument cannot have
    ├── DtypeError (TypeError)           a dtype or a type that an argument cannot have
    ├── DeviceError (ValueError)         tensors of one call on different devices
    ├── MaskError (ValueError)           a mask that contradicts itself or the call
    ├── BackendError (RuntimeError)      no backend, or not the named one, can serve the call
    ├── MissingExtraError (ImportError)  an optional package is not installed
    ├── ModelError (RuntimeError)        a model or a model file that cannot be used
    └── InputError (ValueError)          a text, token, option or path that cannot be used

Each message says what was expected, what came, and how to mend it.
"""


class MultiheadError(Exception):
    """Base of all errors raised on purpose; catching it catches every one of them."""


class ArgumentError(MultiheadError, ValueError):
    """An argument has a shape or a value that it cannot have."""


class DtypeError(MultiheadError, TypeError):
    """An argument has a dtype or a type that it cannot have."""


class DeviceError(MultiheadError, ValueError):
    """The tensors of one call live on different devices."""


class MaskError(MultiheadError, ValueError):
    """A mask contradicts itself or does not fit the call."""


class BackendError(MultiheadError, RuntimeError):
    """No backend, or not the one named, can serve the call; lists the reasons of each."""


class MissingExtraError(MultiheadError, ImportError):
    """An optional package is not installed; names the extra that brings it."""


class ModelError(MultiheadError, RuntimeError):
    """A model, or a file of one, cannot be used."""


class InputError(MultiheadError, ValueError):
    """A text, a token choice, an option or a path given by the user cannot be used."""


for _error in (MultiheadError, *MultiheadError.__subclasses__()):
    _error.__module__ = "multihead"
del _error
