"""Images in conversations at the terminal, and with a single question."""

import json

import pytest
from helpers import run_chat
from seeing import file_of, idefics_model, picture

from nanopage import LLM, SamplingParams
from nanopage.terminal.commands import WITH_ALIASES
from nanopage.terminal.conversation import Conversation
from nanopage.terminal.loading import FromHere
from nanopage.terminal.local import LocalModel
from nanopage.terminal.session import Session

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS = {"device": "cpu", "dtype": "float32", "enforce_eager": True, "num_gpu_blocks_override": 60}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("smolvlm")
    idefics_model(directory, preprocessor={"size": {"longest_edge": 64}})
    return directory


@pytest.fixture(scope="module")
def llm(directory):
    return LLM(str(directory), **OPTIONS)


@pytest.fixture
def files(tmp_path):
    """Two images, in files of names with spaces."""
    found = []
    for seed, size in enumerate([(60, 40), (30, 60)]):
        found.append(tmp_path / f"a cat {seed}.png")
        found[-1].write_bytes(file_of(picture(*size, seed)))
    return found


def talk(llm, **options):
    llm.engine.reset_prefix_cache()
    options = {"raw": False, "plain": True} | options
    return Conversation(LocalModel(llm), Session(GREEDY, model="tiny"), WITH_ALIASES, **options)


def turn(role, text, *images):
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": role, "content": [*parts, {"type": "text", "text": text}] if parts else text}


def test_images_go_with_messages_and_stay_in_the_conversation(llm, files, capsys):
    chat, sent = talk(llm), []
    for images, text in ((files[:1], "the cat"), ([], "and the dog?"), (files, "both")):
        for file in images:
            chat.take(f"/image {file}")
        said = " ".join(capsys.readouterr().err.split())
        assert all(f"{file.name} (" in said for file in images) and said.endswith(
            "with the next message" * bool(images)
        )
        chat.take(text)
        sent.append(
            turn("user", text, *(picture(*size, seed) for seed, size in enumerate([(60, 40), (30, 60)][: len(images)])))
        )
        (expected,) = llm.chat(sent, GREEDY, use_tqdm=False)
        assert chat.session.messages[-1]["content"] == expected.outputs[0].text
        assert chat.replies[-1].num_prompt_tokens == len(expected.prompt_token_ids)
        sent.append(turn("assistant", expected.outputs[0].text))
    assert chat.replies[0].num_cached_tokens == 0 and chat.replies[1].num_cached_tokens > 30  # also the image
    chat.take("/show")
    assert " ".join(capsys.readouterr().err.split()).count("a cat 0.png (60 x 40 pixels)") == 2
    for command in ("/continue", "/regen"):
        before = chat.session.messages
        chat.take(command)
        assert chat.session.messages[-2] == before[-2] and len(chat.session.messages) == len(before)
    chat.take("/image")
    assert "no image goes with the next message" in capsys.readouterr().err


def test_what_cannot_be_sent_is_refused_by_name(llm, model, files, tmp_path, capsys):
    (tmp_path / "text.png").write_text("no image")
    blind = LLM(str(model), **OPTIONS)
    for chat, argument, error in (
        (talk(llm), tmp_path / "missing.png", "no such file: .*missing.png"),
        (talk(llm), tmp_path, "is not a regular file"),
        (talk(llm), tmp_path / "text.png", "text.png: the file is not an image of the formats"),
        (talk(llm, raw=True), files[0], "--raw has no chat template to send images by"),
        (talk(blind), files[0], "tiny sees no images"),
    ):
        with pytest.raises((ValueError, OSError), match=error):
            chat.take(f"/image {argument}")
        assert chat.attached == []
    chat = talk(llm, load=FromHere({}, {}, raw=False, tools=False, attach=False))
    chat.take(f"/image {files[0]}")
    with pytest.raises(ValueError, match=f"the conversation has images, and {model} sees no images"):
        chat.take(f"/model {model}")
    chat.take('/image ""')
    assert chat.attached == []


def test_a_saved_conversation_keeps_paths_and_notices_other_files(llm, model, files, tmp_path):
    chat = talk(llm)
    chat.take(f"/image {files[0]}")
    chat.take("the cat")
    chat.take(f"/save {tmp_path / 's.json'}")
    saved = json.loads((tmp_path / "s.json").read_text())
    assert saved["version"] == 3 and saved["messages"][0]["images"][0]["path"] == str(files[0])
    again = talk(llm)
    again.take(f"/load {tmp_path / 's.json'}")
    for each in (chat, again):
        each.take("and the dog?")
    assert chat.session.messages == again.session.messages
    for damaged in ([], [5], [{"path": "a"}], [{"path": "a", "sha256": 5}], {}):
        saved["messages"][0]["images"] = damaged
        (tmp_path / "damaged.json").write_text(json.dumps(saved))
        with pytest.raises(ValueError, match=r"is damaged: messages\[0\]\['images'\] must"):
            again.take(f"/load {tmp_path / 'damaged.json'}")
    with pytest.raises(ValueError, match="tiny sees no images"):
        talk(LLM(str(model), **OPTIONS)).take(f"/load {tmp_path / 's.json'}")
    files[0].write_bytes(file_of(picture(60, 40, 1)))
    again.take(f"/load {tmp_path / 's.json'}")  # it is in memory
    with pytest.raises(ValueError, match=r"a cat 0\.png has changed since it was sent"):
        talk(llm).take(f"/load {tmp_path / 's.json'}")
    files[0].unlink()
    with pytest.raises(FileNotFoundError, match=r"a cat 0\.png"):
        talk(llm).take(f"/load {tmp_path / 's.json'}")


def test_one_question_about_images(directory, llm, model, files, tmp_path):
    def ask(path, *arguments):
        return run_chat("--model", path, "--eager", "--dtype", "float32", "--max-tokens", 6, *arguments)

    done = ask(directory, "--json", "--temperature", 0, *(f"--image={file}" for file in files), "What", "is", "this?")
    assert done.exit_code == 0, done.stderr
    message = turn("user", "What is this?", picture(60, 40), picture(30, 60, 1))
    params = SamplingParams(temperature=0, max_tokens=6)
    (expected,) = llm.chat([message], params, use_tqdm=False)
    assert json.loads(done.stdout)["text"] == expected.outputs[0].text
    for path, arguments, code, error in (
        (directory, ["-p", "a", "--image", tmp_path / "no.png"], 1, "no such file"),
        (directory, ["-p", "a", "--raw", "--image", files[0]], 2, "--image needs a chat template"),
        (model, ["-p", "a", "--image", files[0]], 1, "sees no images"),
    ):
        done = ask(path, *arguments)
        assert (done.exit_code, done.stdout) == (code, "") and error in done.stderr
