"""The commands: lines that begin with a slash. `argument` is None if there is none."""

import contextlib
import dataclasses
import re
from datetime import datetime
from pathlib import Path

from nanopage.params import SamplingParams
from nanopage.terminal.conversation import RULE, Command, Conversation
from nanopage.terminal.images import images_of
from nanopage.terminal.prompt import edit
from nanopage.terminal.session import Session, check_setting
from nanopage.terminal.text import say, say_drawn, say_table

MAP_LINES = 20  # lines of the map of /blocks


def show_help(chat: Conversation, argument: str | None) -> None:
    say_table((f"{name} {form}".strip(), text) for name, (form, text, _) in COMMANDS.items())
    say(f"Also {', '.join(f'{alias} for {name}' for alias, name in ALIASES.items())}.")
    say('"""\nseveral lines\n"""  is one message; so is a paste. // begins a message with a slash.')
    say(f"Context: {RULE}.")


def system(chat: Conversation, argument: str | None) -> None:
    session = chat.session
    if argument is None:
        say(f"system: {session.system}" if session.system else "no system message")
        return
    if chat.raw:
        raise ValueError("--raw has no chat template, and so no system message")
    session.system = None if argument in ("", '""') else argument
    chat.known = []
    say("system message set" if session.system else "system message removed")


def change_setting(chat: Conversation, argument: str | None) -> None:
    if argument is None:
        _say_settings(chat.session.settings())
        return
    parts = re.fullmatch(r"([^\s=]*)\s*(=?)\s*(.*)", argument, re.DOTALL)
    name, equals, value = parts.groups() if parts else (argument, "", "")
    check_setting(name)
    params = chat.session.params
    if value == "default":
        params = dataclasses.replace(params, **{name: getattr(chat.defaults, name)})
    elif value:
        params = chat.session.changed(name, value)
    elif equals:
        raise ValueError(f"/set {name}= needs a value; /set {name} default resets it")
    chat.model.check(params)
    chat.session.params = params
    if value:
        (chat.given.discard if value == "default" else chat.given.add)(name)
    say(f"{name} = {getattr(params, name)!r}")


def show(chat: Conversation, argument: str | None) -> None:
    limit = chat.model.max_model_len
    say_table(
        [
            ("model", chat.describe_model()),
            ("context", f"{limit:,} tokens; {RULE}" if limit else "the server does not say how long it is"),
            ("system", chat.session.system or "-"),
            ("images", _describe(chat, [*images_of(chat.session.messages), *chat.attached]) or "-"),
        ]
    )
    usual, settings = SamplingParams(), chat.session.settings()
    _say_settings({name: value for name, value in settings.items() if value != getattr(usual, name)})
    say("The other settings have their default values; /set lists all.")


def _say_settings(settings: dict) -> None:
    say_table((name, repr(value)) for name, value in settings.items())


def image(chat: Conversation, argument: str | None) -> None:
    if argument is not None:
        chat.check_images()
        chat.attached = [] if argument in ("", '""') else [*chat.attached, chat.images.add(argument)]
    names = _describe(chat, chat.attached)
    say(f"{names}: with the next message" if names else "no image goes with the next message")


def _describe(chat: Conversation, images: list[dict]) -> str:
    return ", ".join(map(chat.images.describe, images))


def edit_message(chat: Conversation, argument: str | None) -> None:
    asked = [message["content"] for message in chat.session.messages if message["role"] == "user"]
    text = edit(asked[-1] if asked else "")
    if text is None or not text.strip():
        say("Nothing was saved: nothing is sent." if text is None else "The message is empty: nothing is sent.")
        return
    say(text)
    chat.ask(text)


def continue_reply(chat: Conversation, argument: str | None) -> None:
    if not chat.session.messages:
        raise ValueError("no reply to continue")
    if chat.last is not None and chat.last.finish_reason == "stop":
        raise ValueError("the last reply is whole: it ended by itself")
    begun, ids = chat.model.begun(chat.session.messages[-1]["content"], chat.last_ids, chat.session.params)
    steps = chat.session.messages[-1].get("steps", ())
    chat.reply(chat.session.messages[:-1], "The reply is as it was before", begun, ids, steps)


def regenerate(chat: Conversation, argument: str | None) -> None:
    if not chat.session.messages:
        raise ValueError("no reply to generate again")
    if chat.session.params.greedy:
        say("temperature is 0: the reply will be the same (/set temperature 0.7)")
    elif chat.session.params.seed is not None:
        say("seed is set: the reply will be the same (/set seed none)")
    chat.known = []
    chat.reply(chat.session.messages[:-1], "The earlier reply is back")


def undo(chat: Conversation, argument: str | None) -> None:
    say(f"{chat.undo()}; {len(chat.session.messages) // 2} turn(s).")


def clear(chat: Conversation, argument: str | None) -> None:
    chat.become([], 0, "The conversation is back")
    if chat.kept is not None:
        chat.kept.begin()
    say("The conversation is empty; system message and settings are as they were. /undo brings it back.")


def save(chat: Conversation, argument: str | None) -> None:
    if argument is None:
        raise ValueError("/save FILE")
    file = Path(argument).expanduser()
    chat.session.save(file)
    say(f"saved to {file}")


def load(chat: Conversation, argument: str | None) -> None:
    kept = chat.kept.earlier() if chat.kept is not None else []
    if argument is None:
        _list_kept(kept)
        return
    if not argument.isdecimal():
        chat.load_file(Path(argument).expanduser())
    elif 1 <= int(argument) <= len(kept):
        chat.load_file(kept[int(argument) - 1])
    else:
        raise ValueError(f"there is no kept conversation {argument}: /load lists them (./{argument} is a file)")


def _list_kept(kept: list[Path]) -> None:
    if not kept:
        raise ValueError("/load FILE (no other conversation is kept)")
    say_table((str(number), *_summary(file)) for number, file in enumerate(kept, 1))
    say("/load NUMBER goes on with one of them, /load FILE with one that you saved.")


def _summary(file: Path) -> tuple[str, str, str]:
    """The time of a kept conversation's last change, its number of turns, and its beginning."""
    session, when = Session(SamplingParams()), ""
    with contextlib.suppress(OSError):
        when = f"{datetime.fromtimestamp(file.stat().st_mtime):%Y-%m-%d %H:%M}"
    try:
        session.load(file)
    except (ValueError, OSError):
        return when, "-", "it is damaged"
    began = " ".join(session.messages[0]["content"].split()) if session.messages else ""
    return when, f"{len(session.messages) // 2} turn(s)", began[:40]


def model(chat: Conversation, argument: str | None) -> None:
    if argument is not None:
        chat.switch_model(None if argument == "default" else argument)
    say(chat.describe_model())


def stats(chat: Conversation, argument: str | None) -> None:
    replies = chat.replies
    tokens_in, cached = sum(r.num_prompt_tokens or 0 for r in replies), sum(r.num_cached_tokens or 0 for r in replies)
    say_table(
        [
            ("replies", str(len(replies))),
            ("tokens in", f"{tokens_in:,}, of which {cached:,} came from the prefix cache"),
            ("tokens out", f"{sum(r.num_output_tokens or 0 for r in replies):,}"),
            ("TTFT", _average("{:.2f} s", [r.time_to_first_token for r in replies])),
            ("prefill", _average("{:,.0f} tok/s", [r.prefill_rate for r in replies])),
            ("decode", _average("{:,.1f} tok/s", [r.decode_rate for r in replies])),
            *chat.model.figures(),
        ]
    )


def blocks(chat: Conversation, argument: str | None) -> None:
    picture = chat.model.picture()
    from nanopage.terminal.blocks import CACHED, FREE, draw  # imports the engine

    say_drawn(lambda width: draw(picture, width, MAP_LINES))
    say(f"{FREE} free, {CACHED} in the prefix cache. The sentences: the last step.")


def _average(form: str, values: list[float | None]) -> str:
    known = [value for value in values if value]
    return f"{form.format(sum(known) / len(known))} on average" if known else "-"


def leave(chat: Conversation, argument: str | None) -> None:
    chat.done = True


ALIASES = {"/bye": "/exit", "/quit": "/exit", "/?": "/help"}
COMMANDS: dict[str, Command] = {
    "/help": ("", "this list", show_help),
    "/system": ("[TEXT]", 'show or set the system message; "" removes it', system),
    "/set": ("[NAME [VALUE]]", "show or change settings: /set temperature 0.7, /set seed default", change_setting),
    "/show": ("", "model, system message, images and settings", show),
    "/image": ("[FILE]", 'send an image with the next message, or list them; "" removes them', image),
    "/edit": ("", "write a message in $VISUAL or $EDITOR, beginning with the last one", edit_message),
    "/continue": ("", "go on with a reply that was cut or stopped", continue_reply),
    "/regen": ("", "another reply to the last message", regenerate),
    "/undo": ("", "take back the last turn, /regen, /continue or /clear", undo),
    "/clear": ("", "forget the conversation, keep system message and settings", clear),
    "/save": ("FILE", "write conversation, system message and settings", save),
    "/load": ("[FILE]", "go on with what was saved, or list what was kept", load),
    "/model": ("[PATH]", "show the model, or go on with another one; default: SmolLM2-135M-Instruct", model),
    "/stats": ("", "tokens, times and KV blocks", stats),
    "/blocks": ("", "the KV blocks: free, cached, in use", blocks),
    "/exit": ("", "leave, as Ctrl-D does", leave),
}
WITH_ALIASES = COMMANDS | {alias: COMMANDS[name] for alias, name in ALIASES.items()}
