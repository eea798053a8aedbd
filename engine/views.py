"""Torch tensors over memory that torch does not own: a region's addresses.

Making a tensor touches nothing, so a region may be unmapped; the caller keeps it reserved as long as the tensor lives.
"""

from __future__ import annotations

import ctypes

import torch
import torch.utils.dlpack

from swapper.frames import Region

_DL_CUDA, _DL_UINT = 2, 1


def region_bytes(region: Region) -> torch.Tensor:
    """All of a region as a flat tensor of bytes."""
    device = torch.device(region.device)
    if device.type == "cpu":
        buffer = (ctypes.c_ubyte * region.nbytes).from_address(region.address)
        return torch.frombuffer(buffer, dtype=torch.uint8)
    return _from_device_address(region.address, region.nbytes, device.index or 0)


def view(data: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of that type and shape whose bytes start at `offset` of `data`, which is flat and of bytes."""
    count = 1
    for size in shape:
        count *= size
    return data[offset : offset + count * dtype.itemsize].view(dtype).view(shape)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_exported: list[tuple[_DLManagedTensor, ctypes.Array[ctypes.c_int64]]] = []  # torch reads them as long as tensors live


def _from_device_address(address: int, nbytes: int, index: int) -> torch.Tensor:
    """DLPack is the way in that believes the address: CUDA's array interface asks the driver about it, which knows
    nothing of addresses that are reserved and not mapped."""
    shape = (ctypes.c_int64 * 1)(nbytes)
    tensor = _DLTensor(address, _DL_CUDA, index, 1, _DL_UINT, 8, 1, shape, None, 0)
    managed = _DLManagedTensor(tensor, None, None)
    _exported.append((managed, shape))
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return torch.utils.dlpack.from_dlpack(new_capsule(ctypes.addressof(managed), b"dltensor", None))
