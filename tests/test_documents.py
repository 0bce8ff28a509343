"""Every block of code in every document runs, or a comment before it says why it does not.

Python runs, in one namespace for each document. A `text` block right behind it is what it prints. Of commands, curl
runs and `nanopage serve` starts, in this process; the options of nanopage's other programs and of Ray's are checked by
their own parsers. Hub ids are tiny models. Without NANOPAGE_LONG_TESTS=1, so is the default model in the documents of
TINY, and their outputs are not compared. Comments before a block, which do not show:

    <!-- not run: WHY -->         Python is only parsed; unknown commands are left out, and curl does not run
    <!-- not compared: WHY -->    the output is an example
    <!-- file: NAME -->           the block is this file
"""

import ast
import contextlib
import functools
import importlib
import io
import re
import shlex
import threading
import time
import tomllib
import urllib.request
from pathlib import Path

import pytest
import yaml
from encoders import tiny_encoder, write_modules
from helpers import LONG, bench_command, tiny_model
from seeing import idefics_model
from tokenizers import Tokenizer
from typer.main import get_command

from nanopage import EngineArgs
from nanopage.__main__ import app as program
from nanopage.grammar.tool_functions import load_functions
from nanopage.server import batch, serve
from nanopage.weights import hub

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
TINY = set() if LONG else {"README.md", "lora.md", "server.md", "speculation.md", "tools.md"}
URL = "http://127.0.0.1:8000"
BLOCK = re.compile(r"(?:^<!-- ([\w ]+): (.*) -->\n)?^```(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
ELSEWHERE = ("git", "source", "ruff", "mypy", "pytest")  # programs of others; test_course.py runs the exercises


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function from a hub id to a tiny model in its place."""

    @functools.cache
    def find(name: str) -> Path:
        directory = tmp_path_factory.mktemp("models") / name.rpartition("/")[2]
        directory.mkdir()
        if "MiniLM" in name:
            return write_modules(tiny_encoder(directory))
        if "SmolVLM" in name:
            idefics_model(directory)
            return directory
        if "bge-reranker" in name:
            return tiny_encoder(directory, "xlm-roberta", num_labels=1)
        family, length = ("qwen3", 4096) if "Qwen3" in name else ("llama", 512)
        tiny_model(directory, family, vocab_size=302, max_position_embeddings=length)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_tokens(["yes", "no"])
        tokenizer.save(str(directory / "tokenizer.json"))
        return directory

    return find


class Shell:
    """Runs the blocks of one document. `nanopage serve` sets the server, and the first call starts it."""

    def __init__(self, compares: bool):
        self.compares, self.names, self.printed = compares, {}, ""
        self.server: serve.Server | None = None
        self.url = ""

    def run(self, marker: str, reason: str, language: str, text: str, is_output: bool) -> None:
        assert marker in ("", "not run", "not compared", "file") and bool(marker) == bool(reason)
        runs = marker != "not run"
        if marker == "file":
            Path(reason).write_text(text)
        elif language == "python" and runs:
            code, printed = text.replace(URL, self.start() if URL in text else ""), io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, "a document", "exec"), self.names)
            self.printed = printed.getvalue()
        elif language == "python":
            ast.parse(text)
        elif language == "text":
            assert marker or not (is_output and self.compares) or self.printed == text
        elif language == "sh":
            for command in commands(text):
                self.check(command, runs)
        elif language in ("toml", "yaml", "ini"):
            assert {"toml": tomllib.loads, "yaml": yaml.safe_load}.get(language, str)(text)
            for command in re.findall(r"nanopage serve .*", text):
                self.check(shlex.split(command), runs)
        else:
            assert not runs, f"```{language}: give a language, `text` for what is no code, or a comment"

    def check(self, words: list[str], runs: bool) -> None:
        """Check a command. Run it if it is curl."""
        while words and (words[0] == "export" or re.match(r"[A-Z_]+=", words[0])):
            words = words[1:]
        match words:
            case []:
                pass
            case ["nanopage", "serve", *options]:
                self.serve(options)
            case ["nanopage", "run-batch", *options]:
                batch.parser().parse_args(options)
            case ["nanopage", *options]:
                parse(get_command(program), options)
                if "--tools" in options:
                    load_functions(Path(options[options.index("--tools") + 1]))
            case ["python", "chat.py", *options]:
                parse(get_command(program), ["chat", *options])
            case ["python", "bench.py", *options]:
                parse(bench_command(), options)
            case ["python", "-m", module, *_]:
                assert importlib.util.find_spec(module)
            case ["python" | "pytest", *rest]:
                assert all((ROOT / word).is_file() for word in rest if word.endswith(".py")), rest
            case ["pip", "install", *rest]:
                extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
                named = ",".join(re.findall(r"(?:nanopage|\.)\[([\w,]+)\]", " ".join(rest)))
                assert set(filter(None, named.split(","))) <= extras.keys(), rest
            case ["ray", *options]:
                parse(importlib.import_module("ray.scripts.scripts").cli, options)
            case ["curl", url, *options] if runs and url.startswith(URL):
                body = options[options.index("-d") + 1].encode() if "-d" in options else None
                call = urllib.request.Request(
                    url.replace(URL, self.start()), body, {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(call) as reply:  # raises for a status that is not 200
                    assert reply.read()
            case [name, *_]:
                assert not runs or name in ELSEWHERE, f"{name}: a comment must say why it does not run"

    def serve(self, options: list[str]) -> None:
        args = serve.parser().parse_args(options)
        if args.models_dir or any("=" in model for model in args.model or ()):  # models that are not here
            return
        if args.replicas is not None:  # the rest would start Ray
            serve.check_replicas(args)
            EngineArgs.from_cli_args(args)
            return
        servers: list[serve.Server] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serve.Server, "run", lambda server: servers.append(server))
            assert serve.main(options) == 0
        if not (args.model_tag or "").startswith(("~", "/")):  # a model that is not here
            self.close()
            (self.server,) = servers

    def start(self) -> str:
        """Start the server, if it does not run. Returns its URL."""
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

    def close(self) -> None:
        if self.url:
            self.server.should_exit = True
            self.thread.join()
        self.url = ""


def commands(text: str) -> list[list[str]]:
    """The words of each command of a script. A quotation may go on over several lines."""
    text = re.sub(r"(^|[ \t])#.*", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>\n")
    lexer.commenters, lexer.whitespace, lexer.whitespace_split = "", " \t", True
    found: list[list[str]] = [[]]
    for word in lexer:
        if word in ("<", ">"):  # a file
            next(lexer)
        elif word.strip("|&;\n"):
            found[-1].append(word)
        else:
            found.append([])
    return [words for words in found if words]


def parse(command, arguments: list[str]) -> None:
    """Parse the arguments of a command of typer or click, and those of its subcommand."""
    with command.make_context("program", list(arguments)) as context:
        if hasattr(command, "resolve_command"):
            _, subcommand, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            parse(subcommand, rest)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_blocks_of_a_document_run(document, models, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_from_hub", models)
    if document.name in TINY:
        monkeypatch.setattr(hub, "default_model", lambda: models(hub.DEFAULT_MODEL))
    monkeypatch.chdir(tmp_path)
    text, end, last, count = document.read_text(), 0, "", 0
    with contextlib.closing(Shell(document.name not in TINY)) as shell:
        for match in BLOCK.finditer(text):
            marker, reason, language, code = match.groups("")
            is_output = last == "python" and not text[end : match.start()].strip()
            try:
                shell.run(marker, reason, language, code, is_output)
            except BaseException as error:
                error.add_note(f"in this block of {document.name}:\n{code}")
                raise
            end, last, count = match.end(), language, count + 1
    assert count * 2 == len(re.findall(r"^ *```", text, re.MULTILINE)), "a block that this test does not see"
