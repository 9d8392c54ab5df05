"""Every error that kvrelay raises on purpose. The message is the sentence a person reads.

KVRelayError
├── ConfigError          a setting is wrong: names the variable, the value and what would do
├── InvalidRequest       the client's fault: names the field
├── ConstraintError      a constraint on an answer cannot be read, or not be kept to
├── ModelMissing         there is no model where one was expected
├── DeviceError          the device, or its SDK, cannot do what was asked
├── Cancelled            the job ended while we worked on it; leave, say nothing
├── TransferError        a KV cache did not arrive; the job needs another attempt
│   ├── CreditVoid       … because the place is gone; the attempt does not count
│   └── FrameError       … because the other side's bytes break the protocol
├── RedisAway            Redis does not answer; it may come back
└── RedisRefused         Redis answered no (out of memory, read only, wrong version)
"""


class KVRelayError(Exception):
    """Root of everything kvrelay raises on purpose."""


class ConfigError(KVRelayError):
    """A setting that cannot work."""

    def __init__(self, variable: str, value: object, remedy: str) -> None:
        super().__init__(f"{variable}={value!s}: {remedy}")
        self.variable = variable


class InvalidRequest(KVRelayError):
    """A request that cannot be served as it stands. ``field`` is the JSON name, '' for the whole body."""

    def __init__(self, field: str, message: str, *, code: str = "invalid_value") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.code = code


class ConstraintError(KVRelayError):
    """What an answer must be cannot be read, or the answer not be kept to it."""


class ModelMissing(KVRelayError):
    """There is no usable model where one was expected."""


class DeviceError(KVRelayError):
    """The device, or its SDK, cannot do what was asked."""


class Cancelled(KVRelayError):
    """The job ended, or its lease went elsewhere, while we worked on it."""


class TransferError(KVRelayError):
    """A KV cache did not arrive whole."""


class CreditVoid(TransferError):
    """The decode worker no longer keeps the place that the credit promised."""


class FrameError(TransferError):
    """Bytes from the network that break the protocol."""


class RedisAway(KVRelayError):
    """Redis does not answer."""


class RedisRefused(KVRelayError):
    """Redis answered, and the answer was no."""
