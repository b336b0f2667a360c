"""`axcore serve MODEL`. Imports neither jax nor flax until the arguments are parsed."""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
from collections.abc import Sequence

from axcore.cli.model import (
    add_adapters,
    add_grammars,
    add_model,
    add_speculation,
    add_step_sizes,
    chosen_adapters,
    chosen_cache,
    chosen_drafter,
    chosen_grammars,
    chosen_layout,
    chosen_step_tokens,
    loaded_model,
    read_text,
)
from axcore.config import AxcoreError
from axcore.plugin import GrammarCompilerOffer, registry

NUMBERS = {
    "max-len": (int, 2048, "maximum number of tokens of a prompt with its output"),
    "max-rows": (int, 8, "maximum number of samples that run at the same time"),
    "max-queue": (int, 64, "maximum number of samples that wait for a row; more are refused with status 429"),
    "max-body-mib": (float, 4.0, "maximum size of a body"),
    "timeout": (float, 600.0, "seconds from a request to the end of its answer"),
    "drain-timeout": (float, 60.0, "seconds that running requests have after SIGTERM"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="axcore serve",
        description="Serves a model over HTTP with the API of OpenAI. The model is a run folder, a folder that "
        "`axcore convert` wrote, or a recipe with initial weights.",
    )
    add_model(parser)
    add_speculation(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: a free one (default: 8000)")
    parser.add_argument("--name", help="name of the model in the API (default: the last part of MODEL)")
    for name, (kind, default, text) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default: {default:g})")
    add_adapters(parser, "an adapter that requests choose by the model NAME; may be repeated")
    add_step_sizes(parser)
    parser.add_argument(
        "--prefix-states",
        type=int,
        default=0,
        help="number of saved states, with which hybrids of attention and Mamba-2 share prefixes (default: 0)",
    )
    parser.add_argument("--api-keys", metavar="FILE", help="file with an API key in each line (default: no key needed)")
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja template (default: the tokenizer's)")
    add_grammars(parser)
    parser.add_argument(
        "--prompt-logprobs", action="store_true", help="offer completions with both echo and logprobs (slower start)"
    )
    parser.add_argument(
        "--embeddings",
        choices=("last", "mean"),
        help="offer embeddings: the hidden state of the last token, or the mean over all tokens (slower start)",
    )
    parser.add_argument("--no-warm-up", action="store_true", help="compile when a request needs a program, not before")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Serves until SIGTERM or Ctrl-C, and returns 0."""
    given = _parser().parse_args(arguments)
    for name in (*NUMBERS, "step-tokens", "burst-tokens"):
        value, least = getattr(given, name.replace("-", "_")), 0 if name == "max-queue" else 1
        if isinstance(value, float) and not 0 < value < math.inf:
            raise AxcoreError(f"--{name} must be above 0 and finite, not {value}")
        if isinstance(value, int) and value < least:
            raise AxcoreError(f"--{name} must be at least {least}, not {value}")
    adapters, room = chosen_adapters(given)
    name = given.name or pathlib.PurePath(given.model).name
    if name in adapters:
        raise AxcoreError(
            f"--adapter {name}={adapters[name]}: the model has the name {name!r}, too. Choose another, or set --name"
        )
    # Without exactly one, requests with a grammar are refused, so that installing another plugin stops no server.
    has_grammars = given.grammars is not None or len(registry().offers(GrammarCompilerOffer)) == 1
    grammars = chosen_grammars(given) if has_grammars else None
    keys = [] if given.api_keys is None else _keys(given.api_keys)
    text = None if given.chat_template is None else read_text(given.chat_template, "--chat-template")

    from axcore.infer import Engine
    from axcore_serve.app import Service
    from axcore_serve.gate import Limits
    from axcore_serve.server import DrainingServer, listening
    from axcore_serve.templates import ChatTemplate

    with listening(given.host, given.port) as listener:
        layout = chosen_layout(given)
        model, tokenizer = loaded_model(given, layout=layout)
        text = text if text is not None else tokenizer.chat_template
        template = None if text is None else ChatTemplate(text, tokenizer.special_tokens)
        limits = Limits(
            max_samples=given.max_rows + given.max_queue,
            max_body_bytes=int(given.max_body_mib * 2**20),
            request_s=given.timeout,
            drain_s=given.drain_timeout,
        )
        cfg = Engine.Config(
            cache=chosen_cache(given),
            grammars=grammars,
            max_rows=given.max_rows,
            max_len=given.max_len,
            step_tokens=chosen_step_tokens(given),
            burst_tokens=given.burst_tokens,
            prefix_states=given.prefix_states,
            speculation=chosen_drafter(given),
            adapters=room,
        )
        with cfg.build(model, tokenizer, eos_ids=tokenizer.eos_ids, layout=layout) as engine:
            for each, folder in adapters.items():
                engine.load_adapter(each, folder)
            if not given.no_warm_up:
                print(f"{name}: compiling all programs, which may take minutes", file=sys.stderr, flush=True)
                engine.warm_up(prompt_logprobs=given.prompt_logprobs, embeddings=given.embeddings is not None)
            service = Service(
                engine,
                name,
                limits,
                keys=keys,
                template=template,
                scores_prompts=given.prompt_logprobs,
                pooling=given.embeddings,
            )
            host, port = listener.getsockname()[:2]
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            print(f"serving {name} at http://{address}/v1", file=sys.stderr, flush=True)
            DrainingServer(service).run(sockets=[listener])
    return 0


def _keys(file: str) -> list[str]:
    keys = [line.strip() for line in read_text(file, "--api-keys").splitlines() if line.strip()]
    if not keys:
        raise AxcoreError(f"--api-keys {file} has no keys. Write one in each line")
    return keys
