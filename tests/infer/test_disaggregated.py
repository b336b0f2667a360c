"""An engine whose prompts another engine computes gives the tokens of a single one: in one process, from one mesh to
another, and from another process."""

import asyncio
import dataclasses
import io
import os
import queue
import signal
import socketserver
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from flax import nnx

from axcore.config import AxcoreError, ConfigError
from axcore.infer import (
    Engine,
    Grammar,
    Handover,
    PrefillServer,
    RemotePrefill,
    Request,
    read_handover,
    write_handover,
)
from axcore.infer.disaggregation.model_identity import ModelIdentity
from axcore.infer.execution.row_state import RowState
from axcore.infer.requests import Piece, SamplingOptions, TokenLogprob
from axcore.module import functional
from axcore.parallel import Mesh
from axcore.testing.devices import on_devices
from axcore.train.data import ByteTokenizer

from .offload_models import CASES, MAX_LEN, PAGED, prompts, requests
from .test_offload import alone

LENGTHS = (9, 17, 5, 18, 7, 21, 1)


@pytest.fixture(scope="module")
def model():
    return CASES["paged"].model()


@pytest.fixture(scope="module")
def prefill(model):
    with CASES["paged"].engine(model, cache=CASES["paged"].large) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(prefill):
    """The tokens of `requests(LENGTHS)` from a single engine."""
    return alone(prefill, requests(LENGTHS))


@pytest.fixture(scope="module")
def decoding(model, prefill):
    """An engine with a small pool, whose prompts `prefill` computes."""
    cfg = Engine.Config(cache=PAGED, max_len=MAX_LEN, max_rows=3, step_tokens=16)
    with cfg.build(model, eos_ids=(5,), prefill=prefill) as engine:
        yield engine


@pytest.fixture(scope="module")
def handover(prefill):
    """The handover of the first request."""
    found = queue.Queue()
    prefill.export(requests(LENGTHS)[0], found.put)
    return found.get(timeout=120)


def is_clean(*engines):
    """Whether no request is left, and no page leaks."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        stats = [engine.stats for engine in engines]
        if all(each.running == each.waiting == 0 and each.pages.live == 0 for each in stats):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.long
def test_the_tokens_are_those_of_a_single_engine(decoding, prefill, expected):
    """More requests than the decoding engine has rows, so that some wait and some are preempted, twice: the second time
    with cached prefixes on both sides."""
    for _ in range(2):
        found = decoding.generate(requests(LENGTHS))
        assert [piece.ids for piece in found] == expected
    assert [piece.num_cached for piece in found] == [(length - 1) // 4 * 4 for length in LENGTHS]
    assert decoding.stats.cached_tokens == 0  # the other engine found them
    assert decoding.stats.preempted and decoding.stats.bytes_to_device and is_clean(decoding, prefill)


@pytest.mark.long
def test_pieces_are_those_of_a_single_engine(decoding, prefill):
    (ids,) = prompts((19,), seed=3)
    options = SamplingOptions(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=True, min_tokens=3)
    request = Request(ids, options)
    found, single = list(decoding.stream(request)), list(prefill.stream(request))
    assert [(each.ids, each.finish_reason) for each in found] == [(each.ids, each.finish_reason) for each in single]
    assert len(found) == 6 and found[0].prompt_logprobs is not None

    async def streamed():
        return [piece async for piece in decoding.astream(request)]

    for pieces in (found, asyncio.run(streamed())):
        for ours, theirs in zip(pieces, single, strict=True):
            pairs = [*zip(ours.logprobs, theirs.logprobs, strict=True)]
            pairs += zip(ours.prompt_logprobs or (), theirs.prompt_logprobs or (), strict=True)
            for left, right in pairs:
                assert (left.id, left.rank) == (right.id, right.rank)
                np.testing.assert_allclose(left.logprob, right.logprob, atol=1e-5)
    # A sample of one token ends when it is handed over, and a score needs no more than a sample of one token.
    one = Request(ids, SamplingOptions(temperature=0.0, max_tokens=1))
    assert decoding.generate([one])[0] == dataclasses.replace(
        single[0], logprobs=None, finish_reason="length", prompt_logprobs=None
    )
    scores = decoding.score([ids])[0]
    np.testing.assert_allclose(
        [each.logprob for each in scores], [each.logprob for each in single[0].prompt_logprobs], atol=1e-5
    )
    assert is_clean(decoding, prefill)


@pytest.mark.long
def test_stop_strings_are_found_across_the_handover(model, prefill):
    tokenizer = ByteTokenizer.Config().build()
    options = SamplingOptions(temperature=0.0, max_tokens=8, ignore_eos=True)
    (ids,) = prompts((9,), seed=4)
    cfg = Engine.Config(cache=PAGED, max_len=MAX_LEN, max_rows=3, step_tokens=16)
    with cfg.build(model, tokenizer, prefill=prefill) as engine:
        whole = engine.generate([Request(ids, options)])[0]
        stop = whole.text[:2]  # of the first two tokens
        found = engine.generate([Request(ids, dataclasses.replace(options, stop=(stop,)))])[0]
    assert (found.text, found.finish_reason, len(found.ids)) == ("", "stop", 2)


@pytest.mark.long
def test_requests_that_do_not_fit_raise(decoding):
    with pytest.raises(ConfigError, match=r"request.ids: a prompt of 48 tokens leaves no room"):
        decoding.stream(Request((6,) * MAX_LEN))
    with pytest.raises(ConfigError, match="is not below 32"):
        decoding.stream(Request((99,)))


class HeldPrefill:
    """Holds handovers until they are released."""

    def __init__(self, engine):
        self.engine, self.held = engine, queue.Queue()

    def export(self, request, deliver, *, sample=0):
        return self.engine.export(request, lambda found: self.held.put((deliver, found)), sample=sample)


@pytest.mark.long
def test_requests_that_are_cancelled_wherever_they_are_leave_nothing(model, prefill, expected):
    held = HeldPrefill(prefill)
    cfg = Engine.Config(cache=PAGED, max_len=MAX_LEN, max_rows=1, step_tokens=16)
    first, second, *_ = requests(LENGTHS)
    with cfg.build(model, eos_ids=(5,), prefill=held) as engine:
        in_prefill = engine.stream(dataclasses.replace(first, ids=first.ids * 3))
        in_prefill.cancel()
        deliver, found = held.held.get(timeout=60)
        assert found == Piece((), finish_reason="cancelled") or isinstance(found, Handover)
        deliver(found)
        assert in_prefill.result().finish_reason == "cancelled"

        between = engine.stream(first)
        deliver, found = held.held.get(timeout=60)
        assert engine.stats.waiting == 1
        between.cancel()
        deliver(found)
        assert between.result().finish_reason == "cancelled"

        # One row only: the second waits with its state on the host, and is cancelled there.
        running, waiting, other = engine.stream(first), engine.stream(second), engine.stream(second)
        for _ in range(3):
            deliver, found = held.held.get(timeout=60)
            deliver(found)
        assert next(waiting).ids == expected[1][:1]
        waiting.cancel()
        assert waiting.result().finish_reason == "cancelled"
        assert (running.result().ids, other.result().ids) == (expected[0], expected[1])
        assert is_clean(engine, prefill)


@pytest.mark.long
def test_an_engine_that_closes_during_the_handover_ends_the_request(model, prefill):
    held = HeldPrefill(prefill)
    with Engine.Config(cache=PAGED, max_len=MAX_LEN, max_rows=1).build(model, prefill=held) as engine:
        stream = engine.stream(requests(LENGTHS)[0])
        deliver, found = held.held.get(timeout=60)
    deliver(found)
    with pytest.raises(AxcoreError, match="the engine is closed"):
        stream.result()


@pytest.mark.long
def test_a_prefill_engine_that_fails_ends_its_requests_only(model):
    case = CASES["paged"]
    with case.engine(model) as engine, case.engine(model) as prefill:
        prefill.close()
        cfg = Engine.Config(cache=PAGED, max_len=MAX_LEN, max_rows=2)
        with cfg.build(model, eos_ids=(5,), prefill=prefill) as decoding:
            with pytest.raises(AxcoreError, match="the engine is closed"):
                decoding.stream(requests(LENGTHS)[0])
            assert decoding.stats.waiting == 0
            handed = queue.Queue()
            engine.export(requests(LENGTHS)[0], handed.put)
            pieces = queue.Queue()
            decoding.resume(requests(LENGTHS)[0], handed.get(timeout=60), pieces.put)
            assert len(pieces.get(timeout=60).ids) == 1


@pytest.mark.long
def test_a_handover_is_the_same_after_a_file(handover):
    scores = (TokenLogprob(3, -0.5, 2, ((1, -0.25), (2, -1.5))),)
    given = dataclasses.replace(handover, logprob=scores[0], prompt_logprobs=scores)
    file = io.BytesIO()
    write_handover(given, file)
    file.seek(0)
    found, wanted = read_handover(file), dataclasses.replace(given, state=given.state.on_host())
    assert dataclasses.replace(found, state=None) == dataclasses.replace(wanted, state=None)
    assert found.state.num_tokens == wanted.state.num_tokens and found.state.page_size == wanted.state.page_size
    for ours, theirs in zip(
        (*found.state.pages, found.state.slot), (*wanted.state.pages, wanted.state.slot), strict=True
    ):
        assert ours.keys() == theirs.keys()
        for path, block in theirs.items():
            assert ours[path].dtype == block.dtype
            np.testing.assert_array_equal(ours[path], block)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8", "float32"])
def test_every_dtype_survives(dtype):
    block = np.arange(24, dtype=np.float32).reshape(2, 3, 4).astype(jax.numpy.dtype(dtype))
    state = RowState(5, 4, ({"a.keys": block},), {"b.end": block[:1, :0]})
    file = io.BytesIO()
    write_handover(Handover("model", "weights", (1, 2), state, num_cached=3), file)
    file.seek(0)
    handover = read_handover(file)
    assert handover.num_cached == 3
    found = handover.state
    np.testing.assert_array_equal(found.pages[0]["a.keys"], block)
    assert found.slot["b.end"].shape == (1, 0, 4) and found.slot["b.end"].dtype == block.dtype


@pytest.mark.long
def test_bytes_that_are_not_a_handover_raise(handover):
    file = io.BytesIO()
    write_handover(handover, file)
    data = file.getvalue()
    changed = bytearray(data)
    changed[-3] ^= 1
    version = bytearray(data)
    version[16] = 99
    header = data.replace(b'"page_size"', b'"page-size"')
    for given, message in (
        (b"", "it ends in its first bytes, after 0 of 28 bytes"),
        (b"x" * 100, "it starts with b'xxxxxxxxxxxxxxxx'"),
        (data[:40], "it ends in its header"),
        (data[:-5], r"it ends in decoder.*values.*bytes. Send it again"),
        (bytes(changed), r"the bytes of decoder.*values.* were changed"),
        (bytes(version), "it has version 99, but this is 3"),
        (header, "its header is not valid: 'page_size'"),
    ):
        with pytest.raises(AxcoreError, match=message):
            read_handover(io.BytesIO(given))


@pytest.mark.long
def test_handovers_of_other_models_caches_and_requests_raise(decoding, handover):
    request = requests(LENGTHS)[0]
    state = handover.state.on_host()
    (pages,) = state.pages
    path = next(iter(pages))

    def with_state(**changes):
        return dataclasses.replace(handover, state=dataclasses.replace(state, **changes))

    for given, message in (
        (dataclasses.replace(handover, model="other"), "it comes from the model other, but this engine has"),
        (dataclasses.replace(handover, ids=(1, *handover.ids[1:])), "Resume the exported request"),
        (dataclasses.replace(handover, ids=handover.ids[:-1]), "Resume the exported request"),
        (dataclasses.replace(handover, ids=(*handover.ids[:-1], 99)), "token id 99 is not below 32"),
        (with_state(page_size=8), "the page size is 8, but this engine has 4"),
        (with_state(num_tokens=8), "it has 8 computed"),
        (with_state(pages=()), "9 tokens are in 3 pages, but only 0 are given"),
        (with_state(pages=({path: block[:2] for path, block in pages.items()},)), "in 3 pages, but only 2 are given"),
        (with_state(pages=({"other": pages[path]},)), f"differs from that of this engine in .*{path}.*other"),
        (with_state(pages=(pages | {path: pages[path].astype(np.float16)},)), f"{path} has float16"),
        (with_state(pages=(pages | {path: pages[path][..., :1]},)), rf"{path} has float32\[4, 2, 1\], but"),
        (with_state(slot={"end": np.zeros((1,), np.int32)}), "differs from that of this engine in end"),
    ):
        with pytest.raises(ConfigError, match=message):
            decoding.resume(request, given, print)
    assert is_clean(decoding)


def test_the_identity_of_a_model_outlives_its_weights(model):
    freed = CASES["paged"].model()
    identity = ModelIdentity(freed)
    for leaf in jax.tree.leaves(functional(freed)[1]):
        leaf.delete()
    assert identity.text == ModelIdentity(model).text


@pytest.mark.long
def test_the_identity_of_a_model(model):
    assert ModelIdentity(model).text == ModelIdentity(CASES["paged"].model()).text
    assert ModelIdentity(model).text != ModelIdentity(CASES["paged"].model(seed=1)).text
    assert ModelIdentity(model).text != ModelIdentity(CASES["ring"].model()).text
    changed = nnx.clone(model)
    changed.embedding.weight[...] = changed.embedding.weight[...] * 2
    assert ModelIdentity(model).text != ModelIdentity(changed).text


def between_meshes():
    """The tokens of a single engine, and of two on the halves of eight devices with other tensor parallelism."""
    case = CASES["paged"]
    model = case.model()
    rules = {"head": "tensor", "kv_head": "tensor", "vocab": "tensor"}
    asked = requests(LENGTHS)
    with case.engine(model, cache=case.large) as single:
        found = [alone(single, asked)]
    devices = jax.devices()
    first, second = (
        Mesh(shape={"data": 4 // size, "tensor": size}, rules=rules).make(devices[start : start + 4])
        for start, size in ((0, 1), (4, 2))
    )
    sizes = {"max_len": MAX_LEN, "max_rows": 3, "step_tokens": 16}
    with (
        Engine.Config(cache=case.large, **sizes).build(model, eos_ids=(5,), layout=first) as prefill,
        Engine.Config(cache=case.cache, **sizes).build(model, eos_ids=(5,), layout=second, prefill=prefill) as decoding,
    ):
        decoding.warm_up(["greedy", "full"])
        prefill.warm_up(["greedy", "full"], handovers=True)
        compiled = prefill.stats.compiled, decoding.stats.compiled
        found.append([piece.ids for piece in decoding.generate(asked)])
        assert compiled == (prefill.stats.compiled, decoding.stats.compiled)
        places = {device for leaf in jax.tree.leaves(decoding._core.programs.state) for device in leaf.devices()}
        assert places == set(second.mesh.devices.flat)
    return found


@pytest.mark.long
def test_handovers_between_meshes():
    single, disaggregated = on_devices(between_meshes)
    assert disaggregated == single


def serve():
    """The other process: computes prompts until its standard input is closed."""
    case = CASES["paged"]
    with case.engine(case.model(), cache=case.large) as engine, PrefillServer(engine) as server:
        print(server.address[1], flush=True)
        sys.stdin.read()


@pytest.fixture
def process():
    """A process that computes prompts, and its address."""
    code = "from tests.infer.test_disaggregated import serve; serve()"
    env = dict(os.environ, JAX_PLATFORMS="cpu")
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, env=env, text=True) as started:
        yield started, ("127.0.0.1", int(started.stdout.readline()))
        started.kill()


@pytest.mark.long
def test_handovers_from_another_process(process, model, expected):
    """Also: requests that it refuses or that are cancelled, and its sudden end. Other requests go on."""
    other, address = process
    cfg = Engine.Config(cache=PAGED, max_len=MAX_LEN, max_rows=3, step_tokens=16)
    asked = requests(LENGTHS)
    with cfg.build(model, eos_ids=(5,), prefill=RemotePrefill(address)) as engine:
        assert [piece.ids for piece in engine.generate(asked)] == expected
        stream = engine.stream(asked[1])
        stream.cancel()
        assert stream.result().finish_reason == "cancelled"
        refused = queue.Queue()  # by the other process, since no engine here checks the request
        RemotePrefill(address).export(dataclasses.replace(asked[0], adapter="lora"), refused.put)
        assert "adapter" in str(refused.get(timeout=60))
        resumed = engine.stream(dataclasses.replace(asked[0], options=SamplingOptions(ignore_eos=True, seed=1)))
        next(resumed)
        os.kill(other.pid, signal.SIGSTOP)  # so that the next request reaches it but gets no answer
        lost = engine.stream(asked[2])
        time.sleep(0.3)
        other.kill()
        other.wait()
        with pytest.raises(AxcoreError, match=r"the prefill engine at 127.0.0.1:\d+: "):
            lost.result()
        with pytest.raises(AxcoreError, match=r"the prefill engine at 127.0.0.1:\d+: .*refused. Start a PrefillServer"):
            engine.generate([asked[3]])
        assert len(resumed.result().ids) == MAX_LEN - len(asked[0].ids) - 1
        assert is_clean(engine)


def test_requests_arrive_unchanged():
    """Every field of a request and of its options has another value than its default."""
    options = SamplingOptions(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={3: -1.5},
        seed=4,
        max_tokens=5,
        min_tokens=1,
        stop=("a", "b"),
        stop_token_ids=(2,),
        ignore_eos=True,
        logprobs=1,
        prompt_logprobs=True,
        grammar=Grammar.regex("[a-z]+"),
    )
    request = Request((1, 2), options, priority=-1, salt="salt", adapter="sql")
    received = queue.SimpleQueue()

    class Recorder:
        def export(self, request, deliver, *, sample=0):
            received.put((request, sample))
            deliver(Piece((), finish_reason="cancelled"))
            return lambda: None

    with PrefillServer(Recorder()) as server:
        for sent in (request, dataclasses.replace(request, options=SamplingOptions(max_tokens=1), pooling="mean")):
            RemotePrefill(server.address).export(sent, lambda _: None, sample=2)
            assert received.get(timeout=30) == (sent, 2)
    for given, default in ((options, SamplingOptions()), (request, Request((1,)))):
        names = {field.name for field in dataclasses.fields(given)} - {"pooling"}
        assert not [name for name in names if getattr(given, name) == getattr(default, name)]


def test_a_server_that_sends_rubbish_or_nothing_ends_the_request():
    answers = iter([b"rubbish\n", b"{}\nrubbish", b"", b'{"error": "no", "is_config": true}\n', None])

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            self.rfile.readline()
            answer = next(answers)
            if answer is None:
                time.sleep(2)
            else:
                self.wfile.write(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        prefill = RemotePrefill(server.server_address, timeout_s=0.5)
        for message in (
            "Expecting value",
            "it ends in its first bytes",
            "the connection was closed",
            "no",
            "timed out",
        ):
            found = queue.Queue()
            prefill.export(requests(LENGTHS)[0], found.put)
            with pytest.raises(AxcoreError, match=message):
                raise found.get(timeout=30)
        server.shutdown()


@pytest.mark.long
def test_a_cancelled_remote_request_is_cancelled_in_the_prefill_engine(model, prefill):
    held = HeldPrefill(prefill)
    with PrefillServer(held) as server:
        found = queue.Queue()
        cancel = RemotePrefill(server.address).export(requests(LENGTHS)[0], found.put)
        held.held.get(timeout=60)
        cancel()
        assert found.get(timeout=30) == Piece((), finish_reason="cancelled")
    assert is_clean(prefill)
