"""Every exception that gswapd raises on purpose, as one tree.

    GswapdError
    ├── SourceError           a checkpoint cannot be packed: the message names the file and the cure
    │   └── UnsupportedModel  it is readable, but this engine cannot serve it
    ├── StoreError            the model store cannot do what was asked
    │   ├── ModelNotFound
    │   ├── ModelExists
    │   ├── StoreBusy         another `add`, `rm` or `gc` holds the store's lock
    │   └── CorruptImage      manifest or shard file does not parse, or is shorter than it says
    ├── OutOfFrames           the frame pool is empty
    ├── DeviceError           the GPU's driver refused a call
    ├── ReadError             bytes did not arrive: I/O error or short read
    │   └── HashMismatch      bytes arrived and are not the ones that were packed
    ├── PageInAborted         a wait for pages ended because its page-in failed or was given up
    ├── ConfigError           configuration is wrong: the message names the field
    ├── WorkerError           a worker cannot start, or does not answer
    │   └── NoPlace           Ray has no room for a group's workers, now or at all
    └── Refused               the scheduler will not do what was asked; it carries a reason for machines

How they become HTTP answers is written in one place, `server/errors.py`.
"""


class GswapdError(Exception):
    """Base of all errors raised on purpose. `str(error)` is a sentence for a person."""


class SourceError(GswapdError):
    """A checkpoint directory cannot be packed."""


class UnsupportedModel(SourceError):
    """The checkpoint is readable, but the engine cannot serve its architecture."""


class StoreError(GswapdError):
    """The model store cannot do what was asked."""


class ModelNotFound(StoreError):
    """No model of that name is in the store."""


class ModelExists(StoreError):
    """A model of that name is in the store already."""


class StoreBusy(StoreError):
    """Another process holds the store's lock."""


class CorruptImage(StoreError):
    """A manifest or shard file does not parse, or is shorter than the manifest says."""


class OutOfFrames(GswapdError):
    """The frame pool has no free frame."""


class DeviceError(GswapdError):
    """The GPU's driver refused a call."""


class ReadError(GswapdError):
    """Bytes of a shard did not arrive."""


class HashMismatch(ReadError):
    """Bytes of a shard arrived, and are not the ones that were packed."""


class PageInAborted(GswapdError):
    """A wait for pages ended because their page-in failed or was given up."""


class ConfigError(GswapdError):
    """The configuration is wrong."""


class WorkerError(GswapdError):
    """A worker cannot start or does not answer."""


class NoPlace(WorkerError):
    """Ray has no room for a group's workers."""


class Refused(GswapdError):
    """The scheduler will not, or can no longer, do what was asked.

    `reason` is one of the words of `scheduler/core/actions.py`; `retry_after` is in seconds, None where
    trying again does not help.
    """

    def __init__(self, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after
