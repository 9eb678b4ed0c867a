"""What the kernels must know of the device: its architecture, and how many clusters run on it at once."""

from __future__ import annotations

import ctypes
import functools
import logging

import torch

from kvfold_kernels.compress.cute import library

log = logging.getLogger("kvfold")

CLUSTER = 8
_PROBE = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry probe() { ret; }\0"
_THREADS = 384
_MAX_SHARED_OF_BLOCK = 97
"""cudaDevAttrMaxSharedMemoryPerBlockOptin"""
_DYNAMIC_SHARED = 8
"""cudaFuncAttributeMaxDynamicSharedMemorySize"""
_CLUSTER_DIMENSION = 4
"""cudaLaunchAttributeClusterDimension"""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Launch(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@functools.cache
def architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}a"


@functools.cache
def max_clusters() -> int:
    """Clusters of 8 blocks of a whole multiprocessor each that run at once; one more would wait for a whole round.

    A cluster lies in one GPC, and not every GPC has a multiple of 8: an H200's 132 multiprocessors hold 15. The driver
    knows; where it does not say, one cluster less than the multiprocessors would hold, which is right for an H200.
    """
    try:
        return occupancy()
    except (OSError, AttributeError, RuntimeError) as error:
        multiprocessors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        guess = max(1, multiprocessors // CLUSTER - 1)
        log.warning("the driver does not say how many clusters fit (%s); taking %d", error, guess)
        return guess


def occupancy() -> int:
    """Asks cudaOccupancyMaxActiveClusters about an empty kernel whose blocks take all shared memory.

    Raises OSError, AttributeError (a runtime without the call) or RuntimeError.
    """
    runtime = library.cuda_runtime()
    runtime.cudaGetErrorString.restype = ctypes.c_char_p

    def call(name: str, *arguments: object) -> None:
        if status := getattr(runtime, name)(*arguments):
            raise RuntimeError(f"{name}: {runtime.cudaGetErrorString(status).decode()}")

    device, shared_bytes, found = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    call("cudaGetDevice", ctypes.byref(device))
    call("cudaDeviceGetAttribute", ctypes.byref(shared_bytes), _MAX_SHARED_OF_BLOCK, device)
    call("cudaLibraryLoadData", ctypes.byref(module), _PROBE, None, None, 0, None, None, 0)
    try:
        call("cudaLibraryGetKernel", ctypes.byref(kernel), module, b"probe")
        call("cudaKernelSetAttributeForDevice", kernel, _DYNAMIC_SHARED, shared_bytes, device)
        attribute = _Attribute(_CLUSTER_DIMENSION, 0, (CLUSTER, 1, 1))
        launch = _Launch((CLUSTER, 1, 1), (_THREADS, 1, 1), shared_bytes.value, None, ctypes.pointer(attribute), 1)
        call("cudaOccupancyMaxActiveClusters", ctypes.byref(found), kernel, ctypes.byref(launch))
    finally:
        call("cudaLibraryUnload", module)
    if found.value < 1:
        raise RuntimeError("cudaOccupancyMaxActiveClusters: 0")
    return found.value
