"""Tensors of the device ``musa`` over host memory.

DLPack can name a device of PyTorch's extension type, and torch then makes an ordinary tensor with a storage of its
own: it has an address, views share it, and nothing is subclassed. Layout of the structures: dlpack.h of
https://github.com/dmlc/dlpack, version 0.8.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Final

import torch
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import _disable_current_modes

_EXTENSION: Final = 12
"""kDLExtDev, which torch reads as PrivateUse1."""
_UINT: Final = 1


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_new_capsule: Any = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

# One structure for all imports. Torch copies what it says, and looks at it once more when the storage dies, for a
# deleter: there is none, because storages die anywhere, also while an exception is on its way, where no Python may
# run. What a storage needs hangs on its Python object instead, which torch keeps as long as the storage.
_geometry: Final = (ctypes.c_int64 * 2)(0, 1)
_shape: Final = ctypes.cast(_geometry, ctypes.POINTER(ctypes.c_int64))
_strides: Final = ctypes.cast(ctypes.addressof(_geometry) + 8, ctypes.POINTER(ctypes.c_int64))
_managed: Final = _Managed(
    _Tensor(None, _Device(_EXTENSION, 0), 1, _Type(_UINT, 8, 1), _shape, _strides, 0), None, None
)
_lock: Final = threading.RLock()


def tensor_over(address: int, nbytes: int, index: int) -> torch.Tensor:
    """uint8 [nbytes] on ``musa:<index>`` over the host memory at ``address``, which nothing here keeps."""
    with _lock:
        _geometry[0] = nbytes
        _managed.tensor.data = address or None
        _managed.tensor.device.id = index
        capsule = _new_capsule(ctypes.addressof(_managed), b"dltensor", None)
        if not _len_torch_dispatch_stack():
            return torch._C._from_dlpack(capsule)
        with _disable_current_modes():
            return torch._C._from_dlpack(capsule)
