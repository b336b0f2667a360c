"""Clients choose an adapter as a model."""

import openai
import pytest

from axcore.config import ConfigError

from .scripted import Scripted
from .support import posted, serving


@pytest.fixture(scope="module")
def engine():
    return Scripted()


@pytest.fixture(scope="module")
def served(engine):
    with serving(engine, pooling="last") as running:
        yield running


@pytest.fixture
def client(served, engine):
    engine.adapters = ("sql", "chat/v2")
    with served.client() as client:
        yield client


def test_adapters_are_models(client):
    found = {model.id: getattr(model, "parent", None) for model in client.models.list()}
    assert found == {"tiny": None, "sql": "tiny", "chat/v2": "tiny"}
    assert client.models.retrieve("chat/v2").parent == "tiny"


@pytest.mark.parametrize(("model", "adapter"), [("tiny", None), ("sql", "sql"), ("chat/v2", "chat/v2")])
def test_the_model_of_a_request_selects_the_adapter(client, served, engine, model, adapter):
    engine.jobs.clear()
    completion = client.completions.create(model=model, prompt=["a", "b"], max_tokens=2)
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=2
    )
    assert completion.model == chat.model == model
    posted(served, {"model": model, "input": "a"}, path="/v1/embeddings")
    assert [job.request.adapter for job in engine.jobs] == [adapter] * 4


def test_adapters_that_are_not_loaded_do_not_exist(client, served, engine):
    with pytest.raises(
        openai.NotFoundError, match=r"the model 'other' does not exist. Use 'tiny' or 'sql' or 'chat/v2'"
    ):
        client.completions.create(model="other", prompt="a")
    engine.adapters = ("chat/v2",)  # it was unloaded
    for send in (
        lambda: client.completions.create(model="sql", prompt="a"),
        lambda: client.models.retrieve("sql"),
    ):
        with pytest.raises(openai.NotFoundError) as found:
            send()
        assert found.value.code == "model_not_found"
    assert posted(served, {"model": "chat/v2", "prompt": "a", "max_tokens": 1})[0] == 200


def unloaded(request):
    raise ConfigError(f"request.adapter={request.adapter!r} is not loaded; the engine has no adapter")


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
@pytest.mark.parametrize("refuses", ["check", "submit", "deliver"])
def test_the_model_never_answers_for_an_adapter_that_is_unloaded_meanwhile(
    client, served, engine, monkeypatch, path, content, refuses
):
    checked = served.service._check_model

    def unload(name):
        checked(name)
        engine.adapters = ()

    def failed(request, deliver, *, sample=0):
        try:
            unloaded(request)
        except ConfigError as error:
            deliver(error)
        return lambda: None

    monkeypatch.setattr(served.service, "_check_model", unload)
    submit = failed if refuses == "deliver" else lambda request, deliver, *, sample=0: unloaded(request)
    monkeypatch.setattr(engine, *(("check", unloaded) if refuses == "check" else ("submit", submit)))
    status, found = posted(served, {"model": "sql", **content}, path=path)
    assert (status, found["error"]["code"], found["error"]["param"]) == (404, "model_not_found", "model")
    assert found["error"]["message"].startswith("model='sql' is not loaded")
