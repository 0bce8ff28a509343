"""Prompt embeddings and soft prompts in the server."""

import asyncio
import base64
import pickle
import re

import peft
import pytest
import torch
from asgi import call
from helpers import random_tokens, tiny_hf_model
from safetensors.torch import save
from server_process import OPTIONS

from nanopage import AsyncLLM, EngineArgs
from nanopage.server.adapters import ServedAdapters, parse_modules
from nanopage.server.app import create_app
from nanopage.server.options import check_adapters
from nanopage.server.serve import parser
from nanopage.server.state import ServerState

ASK = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(model):
    options = OPTIONS | {"enable_prompt_embeds": True, "enable_prompt_adapter": True}
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(model), **options))
    yield llm
    llm.shutdown()


def ask(llm, body, path="/v1/completions", adapters=None):
    state = ServerState(["tiny"], llm=llm, adapters=adapters or ServedAdapters())
    return asyncio.run(call(create_app(state, hosts=["localhost"]), "POST", path, body))


def encoded(**tensors) -> str:
    return base64.b64encode(save(tensors)).decode()


def test_embeddings_of_tokens_are_those_tokens(llm):
    rows = tiny_hf_model().get_input_embeddings().weight.detach()
    prompts = random_tokens([9, 14])
    expected = ask(llm, ASK | {"prompt": prompts, "n": 2}).json
    embeds = [encoded(x=rows[prompts[0]]), encoded(prompt=rows[prompts[1]].double())]
    made = ask(llm, ASK | {"prompt_embeds": embeds, "n": 2}).json
    assert [each["text"] for each in made["choices"]] == [each["text"] for each in expected["choices"]]
    assert made["usage"]["prompt_tokens"] == 23
    streamed = ask(llm, ASK | {"prompt_embeds": embeds[0], "prompt": "", "stream": True}).events
    assert "".join(each["choices"][0]["text"] for each in streamed) == expected["choices"][0]["text"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt_embeds": "%"}, "prompt_embeds", "prompt_embeds is not base64"),
        ({"prompt_embeds": "äöü="}, "prompt_embeds", "not base64|not a safetensors"),
        ({"prompt_embeds": ""}, "prompt_embeds", "is not a safetensors file"),
        ({"prompt_embeds": base64.b64encode(b"\xff" * 100).decode()}, "prompt_embeds", "is not a safetensors file"),
        (
            {"prompt_embeds": base64.b64encode(pickle.dumps(torch.ones(2, 64))).decode()},
            "prompt_embeds",
            "is not a safetensors file",
        ),
        ({"prompt_embeds": encoded()}, "prompt_embeds", "has 0 tensors"),
        ({"prompt_embeds": encoded(a=torch.ones(2, 64), b=torch.ones(2, 64))}, "prompt_embeds", "has 2 tensors"),
        ({"prompt_embeds": encoded(a=torch.ones(2, 63))}, "prompt_embeds", r"the shape \[tokens, 64\], not \[2, 63\]"),
        ({"prompt_embeds": encoded(a=torch.ones(0, 64))}, "prompt_embeds", "the shape"),
        ({"prompt_embeds": encoded(a=torch.ones(2, 64).to(torch.int8))}, "prompt_embeds", "floats, not torch.int8"),
        ({"prompt_embeds": encoded(a=torch.full((2, 64), torch.nan))}, "prompt_embeds", "not finite"),
        ({"prompt_embeds": encoded(a=torch.ones(128, 64))}, "prompt", "maximum context length is 128"),
        ({"prompt_embeds": []}, "prompt_embeds", "is empty"),
        ({"prompt_embeds": [3]}, "prompt_embeds", ""),
        ({"prompt_embeds": encoded(a=torch.ones(2, 64)), "prompt": "a"}, "prompt", "give either prompt or"),
        ({"prompt_embeds": encoded(a=torch.ones(2, 64)), "echo": True}, "echo", "echo needs a prompt of text"),
        ({"prompt_embeds": encoded(a=torch.ones(2, 64)), "suffix": "a"}, "suffix", "suffix needs a prompt of text"),
        ({}, "prompt", "give either prompt or prompt_embeds"),
    ],
)
def test_what_is_wrong_with_prompt_embeds_is_named(llm, fields, param, message):
    reply = ask(llm, ASK | fields)
    assert reply.status == 400 and reply.error["param"].startswith(param), reply.body
    assert not message or re.search(message, reply.error["message"]), reply.error


def test_embeddings_need_their_option_and_are_for_completions_only(llm):
    body = {"prompt_embeds": encoded(a=torch.ones(2, 64)), "messages": [{"role": "user", "content": "a"}]}
    reply = ask(llm, body, "/v1/chat/completions")
    assert reply.status == 400 and "only /v1/completions takes embeddings" in reply.error["message"]
    readers = llm.engine.input_processor.prompts.item_readers
    reader = readers.pop("prompt_embeds")
    try:
        reply = ask(llm, ASK | {"prompt_embeds": body["prompt_embeds"]})
    finally:
        readers["prompt_embeds"] = reader
    assert reply.status == 400 and "needs --enable-prompt-embeds" in reply.error["message"]


def test_a_soft_prompt_is_a_model(llm, tmp_path):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    soft = peft.get_peft_model(tiny_hf_model(), config)
    soft.save_pretrained(tmp_path)
    adapters = ServedAdapters()
    adapters.requests = {"moon": adapters.check_soft_prompt(llm, "moon", str(tmp_path))}
    app = create_app(ServerState(["tiny"], llm=llm, adapters=adapters), hosts=["localhost"])
    models = {each["id"]: each for each in asyncio.run(call(app, "GET", "/v1/models")).json["data"]}
    assert [*models] == ["tiny", "moon"]
    assert (models["moon"]["root"], models["moon"]["parent"]) == (str(tmp_path), "tiny")
    (prompt,) = random_tokens([8])
    reply = ask(llm, ASK | {"prompt": prompt, "model": "moon"}, adapters=adapters).json
    tokens = list(prompt)
    for _ in range(6):
        tokens.append(int(soft(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    assert reply["choices"][0]["text"] == llm.engine.tokenizer.decode(tokens[8:])
    assert reply["usage"]["prompt_tokens"] == 13
    chat = {"messages": [{"role": "user", "content": "the cat"}], "temperature": 0, "max_tokens": 8}
    texts = {
        name: ask(llm, chat | {"model": name}, "/v1/chat/completions", adapters).json["choices"][0]["message"][
            "content"
        ]
        for name in models
    }
    assert texts["tiny"] != texts["moon"]
    with pytest.raises(ValueError, match=r"prompt adapter 'x': .*adapter_config.json"):
        adapters.check_soft_prompt(llm, "x", str(tmp_path / "nothing"))


def test_options():
    for arguments, message in (
        (["--prompt-adapters", "a=x"], "--prompt-adapters needs --enable-prompt-adapter"),
        (["--enable-prompt-adapter", "--prompt-adapters", "tiny=x"], "the name of the model: tiny"),
        (
            ["--enable-prompt-adapter", "--enable-lora", "--prompt-adapters", "a=x", "--lora-modules", "a=y"],
            "have a name in common",
        ),
    ):
        args = parser().parse_args(arguments)
        names = [*parse_modules("--lora-modules", args.lora_modules), *parse_modules("", args.prompt_adapters)]
        with pytest.raises(ValueError, match=message):
            check_adapters(args, names, ["tiny"])
