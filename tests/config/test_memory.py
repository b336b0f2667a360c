"""The error for arrays and programs that do not fit in memory."""

import pytest

from axcore.config import AxcoreError, OutOfMemory, allocating

PROGRAM = (  # of libtpu 0.0.52
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (18.62T) exceeds available HBM (95.73G). HLO module: jit_train_step.\nSee https://openxla.org"
)
CPU = "RESOURCE_EXHAUSTED: Out of memory allocating 35184372088832 bytes."


def raised(error):
    with pytest.raises(OutOfMemory) as caught, allocating("the caches", "Reduce max_len"):
        raise error
    return caught.value


@pytest.mark.parametrize(
    ("reason", "required", "available", "sizes"),
    [
        (CPU, 2**45, None, ": an array or a program requires 32.0 TiB"),
        (
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.50GiB.",
            3 * 2**29,
            None,
            ": an array or a program requires 1.5 GiB",
        ),
        (PROGRAM, int(18.62 * 2**40), int(95.73 * 2**30), ": 18.6 TiB required, 95.7 GiB available"),
        ("RESOURCE_EXHAUSTED: Out of memory", None, None, ""),
    ],
)
def test_the_error_names_what_does_not_fit_the_sizes_and_what_to_do(reason, required, available, sizes):
    error = raised(RuntimeError(f"INTERNAL: in a step\n{reason}"))
    first = reason.splitlines()[0]
    assert str(error) == f"there is not enough memory for the caches{sizes}. Reduce max_len ({first})"
    assert (error.required, error.available, error.reason) == (required, available, first)


def test_the_memory_of_the_host_counts_too():
    assert str(raised(MemoryError())) == "there is not enough memory for the caches. Reduce max_len (MemoryError)"


def test_an_outer_block_replaces_what_and_advice():
    with pytest.raises(OutOfMemory) as caught, allocating("a cache of 9 tokens", "Reduce --tokens 5"):
        raised_inside()
    assert caught.value.required == 2**45
    assert "caches" not in str(caught.value) and str(caught.value).count("RESOURCE_EXHAUSTED") == 1


def raised_inside():
    with allocating("the caches", "Reduce max_len"):
        raise RuntimeError(CPU)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("RESOURCE_EXHAUSTED: Error writing file: [OS error 28: No space left on device]"),
        OSError(28, "No space left on device"),
        AxcoreError("out of memory"),
    ],
)
def test_other_errors_stay_as_they_are(error):
    with pytest.raises(type(error)) as caught, allocating("the caches", "Reduce max_len"):
        raise error
    assert caught.value is error
