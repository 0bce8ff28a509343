"""Every block of code in every document runs, or a comment before it says why it does not.

Python runs, in one namespace for each document. A `text` block right behind it is what it prints. Of commands, curl
runs and `nanopage serve` starts, in this process; the options of nanopage's other programs and of Ray's are checked by
their own parsers. Configuration files are parsed. Hub ids are tiny models. Without NANOPAGE_LONG_TESTS=1, so is the
default model in the documents of TINY, and their outputs are not compared. Comments before a block, which do not show:

    <!-- not run: WHY -->         Python is only parsed; unknown commands are left out, and curl does not run
    <!-- not compared: WHY -->    the output is an example
    <!-- file: NAME -->           the block is this file
"""

import ast
import configparser
import contextlib
import importlib
import io
import re
import shlex
import threading
import time
import tomllib
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from encoders import tiny_encoder, write_modules
from helpers import LONG, bench_command, tiny_model
from tokenizers import Tokenizer
from typer.main import get_command

from nanopage import EngineArgs
from nanopage.__main__ import app as program
from nanopage.server import serve
from nanopage.tools.functions import load_functions
from nanopage.weights import hub

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
TINY = set() if LONG else {"README.md", "lora.md", "server.md", "speculation.md", "tools.md"}
URL = "http://127.0.0.1:8000"
BLOCK = re.compile(r"(?:^<!-- ([\w ]+): (.*) -->\n)?^```(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
ELSEWHERE = ("git", "source", "ruff", "mypy", "pytest", "export")  # programs of others, and tests of the course


@dataclass
class Block:
    """marker: of the comment before it; behind: the language of the block right before it."""

    language: str
    text: str
    marker: str
    reason: str
    behind: str


def blocks(document: Path) -> list[Block]:
    text, found, end, last = document.read_text(), [], 0, ""
    for match in BLOCK.finditer(text):
        marker, reason, language, code = match.groups()
        behind = last if not text[end : match.start()].strip() else ""
        found.append(Block(language, code, marker or "", reason or "", behind))
        end, last = match.end(), language
    assert len(found) * 2 == len(re.findall(r"^ *```", text, re.MULTILINE)), "a block that this test does not see"
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function from a hub id to a tiny model in its place."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        directory = tmp_path_factory.mktemp("models") / name.rpartition("/")[2]
        directory.mkdir()
        if "MiniLM" in name:
            return write_modules(tiny_encoder(directory))
        if "bge-reranker" in name:
            return tiny_encoder(directory, "xlm-roberta", num_labels=1)
        family, length = ("qwen3", 4096) if "Qwen3" in name else ("llama", 512)
        tiny_model(directory, family, vocab_size=302, max_position_embeddings=length)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_tokens(["yes", "no"])
        tokenizer.save(str(directory / "tokenizer.json"))
        return directory

    def find(name: str) -> Path:
        if name not in made:
            made[name] = make(name)
        return made[name]

    return find


class Shell:
    """Runs the blocks of one document, in a directory of its own. `nanopage serve` sets the server, and the first call
    to it starts it."""

    def __init__(self, compares: bool):
        self.compares = compares
        self.names: dict[str, Any] = {}
        self.printed: list[str] = []
        self.server: serve.Server | None = None
        self.url = ""

    def run(self, block: Block) -> None:
        runs = block.marker != "not run"
        assert block.marker in ("", "not run", "not compared", "file") and bool(block.marker) == bool(block.reason)
        if block.marker == "file":
            Path(block.reason).write_text(block.text)
        elif block.language == "python" and runs:
            printed, code = io.StringIO(), block.text.replace(URL, self.call_url() if URL in block.text else "")
            with contextlib.redirect_stdout(printed):
                exec(compile(code, "a document", "exec"), self.names)
            self.printed = printed.getvalue().splitlines()
        elif block.language == "python":
            ast.parse(block.text)
        elif block.language == "text":
            if self.compares and block.behind == "python" and not block.marker:
                assert self.printed == block.text.splitlines()
        elif block.language == "sh":
            for command in commands(block.text):
                self.check(command, runs)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "yaml":
            entrypoint = yaml.safe_load(block.text)
            if isinstance(entrypoint, dict):
                self.check(shlex.split(entrypoint["spec"]["entrypoint"]), runs)
        elif block.language == "ini":
            (config := configparser.ConfigParser(strict=False)).read_string(block.text)
            self.check(shlex.split(config["Service"]["ExecStart"]), runs)
        else:
            assert not runs, f"```{block.language}: give a language, `text` for what is no code, or a comment"

    def check(self, words: list[str], runs: bool) -> None:
        """Check a command, and run it if it is curl."""
        if words[0] == "export" or re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
        if not words:
            return
        match [Path(words[0]).name, *words[1:]]:
            case ["nanopage", "serve", *options]:
                self.serve(options)
            case ["nanopage", *options]:
                parse(get_command(program), options)
                if "--tools" in options:
                    load_functions(Path(options[options.index("--tools") + 1]))
            case ["python", "chat.py", *options]:
                parse(get_command(program), ["chat", *options])
            case ["python", "bench.py", *options]:
                parse(bench_command(), options)
            case ["python", "-m", module, *_]:
                importlib.util.find_spec(module)
            case ["python" | "pytest", *rest]:
                files = [word for word in rest if word.endswith(".py")]
                assert all((ROOT / file).is_file() for file in files), files
            case ["pip", "install", *rest]:
                extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
                named = re.findall(r"(?:nanopage|\.)\[([\w,]+)\]", " ".join(rest))
                assert {extra for names in named for extra in names.split(",")} <= extras.keys(), rest
            case ["ray", *options]:
                parse(importlib.import_module("ray.scripts.scripts").cli, options)
            case ["curl", url, *options] if runs:
                self.post(url, options[options.index("-d") + 1] if "-d" in options else None)
            case _:
                assert not runs or words[0] in ELSEWHERE, f"{words[0]}: a comment must say why it does not run"

    def serve(self, options: list[str]) -> None:
        args = serve.parser().parse_args(options)
        if args.replicas is not None:
            serve.check_replicas(args)
            EngineArgs.from_cli_args(args)
            return
        servers: list[serve.Server] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serve.Server, "run", lambda server: servers.append(server))
            assert serve.main(options) == 0
        if not (args.model_tag or "").startswith(("~", "/")):  # a model that is not here
            self.stop()
            (self.server,) = servers

    def call_url(self) -> str:
        """The URL of the server, which runs from now on."""
        if self.server is None:
            self.serve([])
        if not self.url:
            self.server.config.port = 0
            self.thread = threading.Thread(target=self.server.run)
            self.thread.start()
            while not self.server.started or self.server.state.llm is None:
                assert self.thread.is_alive()
                time.sleep(0.01)
            self.url = "http://{}:{}".format(*self.server.servers[0].sockets[0].getsockname())
        return self.url

    def post(self, url: str, body: str | None) -> None:
        assert url.startswith(URL)
        headers = {"Content-Type": "application/json"}
        call = urllib.request.Request(self.call_url() + url.removeprefix(URL), body and body.encode(), headers)
        with urllib.request.urlopen(call) as reply:  # raises for a status that is not 200
            assert reply.read()

    def stop(self) -> None:
        if self.url:
            self.server.should_exit = True
            self.thread.join()
        self.url = ""


def commands(text: str) -> list[list[str]]:
    """The words of each command of a script."""
    found, line = [], ""
    for piece in text.splitlines(keepends=True):
        line += piece
        lexer = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        if piece.endswith("\\\n"):
            continue
        try:
            words = list(lexer)
        except ValueError:  # a quotation goes on in the next line
            continue
        line = ""
        while words:
            end = next((i for i, word in enumerate(words) if word in ("|", "&&", ";", "<")), len(words))
            if words[:end]:
                found.append(words[:end])
            words = words[end + 1 :]
    assert not line, f"not complete: {line}"
    return found


def parse(command, arguments: list[str]) -> None:
    """Parse the arguments of a command of typer or click, and those of its subcommand."""
    with command.make_context("program", list(arguments)) as context:
        if hasattr(command, "resolve_command"):
            _, subcommand, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            parse(subcommand, rest)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_blocks_of_a_document_run(document, models, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_from_hub", models)
    monkeypatch.chdir(tmp_path)
    if document.name in TINY:
        monkeypatch.setattr(hub, "default_model", lambda: models(hub.DEFAULT_MODEL))
    shell = Shell(compares=document.name not in TINY)
    try:
        for block in blocks(document):
            try:
                shell.run(block)
            except BaseException as error:
                error.add_note(f"in this block of {document.name}:\n{block.text}")
                raise
    finally:
        shell.stop()
