"""How often encoders run, and what is told of their outputs: in the live view and in metrics."""

import pytest
from rich.console import Console
from seeing import QWEN_PLACE, gemma_model, idefics_model, picture, qwen_model

from nanopage import LLM, SamplingParams
from nanopage.terminal.blocks import draw
from nanopage.view.frames import Frames
from nanopage.view.picture import Picture

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS = {"enforce_eager": True, "dtype": "float64", "num_gpu_blocks_override": 300, "enable_prefix_caching": False}
SMALL = {"preprocessor": {"size": {"longest_edge": 64}}}  # 5 squares


@pytest.mark.parametrize(
    ("save", "options", "placeholder", "calls"),
    [
        (idefics_model, SMALL, "<image>", [15]),
        (gemma_model, {}, "<start_of_image>", [3]),
        (qwen_model, {}, QWEN_PLACE, [2, 1]),  # another size
    ],
    ids=["SmolVLM", "Gemma 3", "Qwen2.5-VL"],
)
def test_images_of_a_step_are_encoded_together(save, options, placeholder, calls, tmp_path):
    save(tmp_path, **options)
    llm, made = LLM(str(tmp_path), max_num_batched_tokens=4096, **OPTIONS), []
    rows = llm.engine.executor.worker.wings.items
    encode = rows.encoders["image"]
    rows.encoders = {"image": lambda payload: (made.append(len(payload["pixels"])), encode(payload))[1]}
    images = [picture(60, 40), picture(60, 40, 1), picture(40, 60, 2), picture(60, 40)]
    prompts = [{"prompt": f"the {placeholder} cat", "multi_modal_data": {"image": image}} for image in images]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert made == calls
    alone = LLM(str(tmp_path), **OPTIONS)
    for output, prompt in zip(together, prompts, strict=True):
        (expected,) = alone.generate(prompt, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_items_and_the_encoder_cache_are_shown(tmp_path):
    idefics_model(tmp_path, **SMALL)
    llm, made = LLM(str(tmp_path), max_num_batched_tokens=64, **OPTIONS), []
    frames, shown = Frames(llm.engine, "tiny"), Picture()

    def follow(stats):
        made.append(frames.step(stats))
        shown.apply(made[-1])

    shown.apply(frames.key())
    llm.engine.listeners.append(follow)
    prompt = {"prompt": "the <image> cat", "multi_modal_data": {"image": picture(60, 40)}}
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    (first,), (again,) = (llm.generate(prompt, params, use_tqdm=False) for _ in range(2))
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    ids, token = first.prompt_token_ids, llm.get_tokenizer().backend.token_to_id("<image>")
    items = made[0]["requests"][0][9]
    places = [place for position, length in items for place in range(position, position + length)]
    assert len(items) == 5 and places == [place for place, each in enumerate(ids) if each == token]
    num_bytes = 5 * 16 * 64 * 8
    assert shown.encoder == (5, num_bytes, 10, 5)
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    names = ("vllm:mm_cache_queries", "vllm:mm_cache_hits", "nanopage:encoder_cache_bytes")
    assert [metrics[name] for name in names] == [10, 5, num_bytes]

    llm.engine.add_request("1", prompt, params)
    llm.engine.step()
    console = Console(width=120)
    with console.capture() as capture:
        console.print(draw(shown, 119, 24))
    assert "5 items" in capture.get() and "11 items looked up, 6 in the encoder cache" in capture.get()
