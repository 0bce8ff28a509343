"""Options from the command line, the environment and a file of --config."""

import re

import pytest
from programs import ROOT

from nanopage import EngineArgs
from nanopage.server import batch, serve
from nanopage.server.option_sources import options_of, read_options, unknown_variables, variable_of


@pytest.fixture
def read(tmp_path):
    """A function that reads the options of the server. `text` is the file of --config, which is named s.yaml."""

    def read(text: str | bytes, *arguments: str, parser=None, **variables: str):
        file = tmp_path / "s.yaml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_options(parser or serve.parser(), ["--config", str(file), *arguments], variables)

    return read


def test_the_command_line_comes_before_the_environment_and_the_environment_before_the_file(read):
    text = "port: 1\nmax-queue: 1\nmax_num_seqs: 1\nmodel: a\nseed: 1\nallowed_host: [a]\ninsecure: true\n"
    variables = {
        "NANOPAGE_PORT": "2",
        "NANOPAGE_MAX_QUEUE": "2",
        "NANOPAGE_ALLOWED_HOST": "b",
        "NANOPAGE_INSECURE": "0",
    }
    args = read(text, "--port", "3", "--allowed_host=c", **variables)
    assert (args.port, args.max_queue, args.max_num_seqs, args.seed, args.insecure) == (3, 2, 1, 1, False)
    assert args.allowed_host == ["c"], "the values of an option come from one place"
    assert args.host == "127.0.0.1" and args.block_size == 16, "defaults"
    args = read(text, "b")
    assert (args.model_tag, args.model) == ("b", None), "MODEL is another name of --model"
    assert read_options(serve.parser(), [], {"NANOPAGE_CONFIG": args.config}).port == 1
    assert read("", "--port", "3").port == 3


def test_values_are_those_of_a_command_line(read):
    text = """
        api_key: 0123                        # no octal number
        served-model-name: [yes, 1e3, 12:30]
        allowed_media_domains: [a.org, b.org]
        root_path: /x/
        uds: ''
        ssl_cert_reqs: "2"
        enable_prefix_caching: No
        strict_fields: on
        speculative_config: {method: ngram, num_speculative_tokens: 3}
        limit_mm_per_prompt: image=4
        hf_overrides: '{"rope_theta": 1e6}'
    """
    args = read(text)
    assert (args.api_key, args.served_model_name, args.root_path) == (["0123"], ["yes", "1e3", "12:30"], "/x")
    assert (args.uds, args.ssl_cert_reqs, args.enable_prefix_caching, args.strict_fields) == ("", 2, False, True)
    engine = EngineArgs.from_cli_args(args)
    assert engine.allowed_media_domains == ["a.org", "b.org"] and engine.limit_mm_per_prompt == {"image": 4}
    assert engine.speculative_config == {"method": "ngram", "num_speculative_tokens": 3}
    assert engine.hf_overrides == {"rope_theta": 1e6}
    args = read("", NANOPAGE_API_KEY=" one, two,", NANOPAGE_UDS="", NANOPAGE_LORA_MODULES="a=/x,b=/y")
    assert (args.api_key, args.uds, args.lora_modules) == (["one", "two"], None, ["a=/x", "b=/y"])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("port: 1\nmax_modle_len: 5\n", "s.yaml, line 2: no such option: max_modle_len. Did you mean max_model_len?"),
        ("model_tag: a", "line 1: no such option: model_tag. Did you mean model?"),
        ("help: true", "no such option: help"),
        ("config: a.yaml", "no such option: config"),
        ("port: 1\nmax-queue: 5\nmax_queue: 6", "line 3: max_queue is there twice"),
        ("port: 1\nport: 1", "line 2: port is there twice"),
        ("\nport: many", "line 2: port: invalid literal for int() with base 10: 'many'"),
        ("port: 70000", "line 1: port: 70000 is not from 0 to 65535"),
        ("port: [1]", "line 1: port: it takes a single value"),
        ("model: {a: b}", "line 1: model: it takes no mapping"),
        ("api_key: {a: b}", "line 1: api_key: it takes no mapping"),
        ("api_key: [a, [b]]", "line 1: api_key: a list of anything but texts"),
        ("port:", "line 1: port: no value"),
        ("named_tool_finish_reason: x", "line 1: named_tool_finish_reason: 'x' is not one of stop, tool_calls"),
        ("insecure: maybe", "line 1: insecure: 'maybe' is neither true nor false"),
        ("speculative_config: [a]", "line 1: speculative_config: 'a' is not JSON"),
        ("speculative_config:\n  a: 2020-01-01", "line 1: speculative_config: JSON has no date"),
        ("speculative_config: {a: 1, a: 2}", "line 1: speculative_config: a is there twice"),
        ("speculative_config: {a: =}", "line 1: speculative_config: could not determine a constructor"),
        ("a: &a [x, x]\nb: &b [*a, *a]\n", "line 1: anchors, aliases and tags are not allowed"),
        ("port: 1\nmodel: !!python/object/apply:os.system [ls]", "line 2: anchors, aliases and tags are not allowed"),
        ("[" * 100_000, "line 1: nested more than 16 levels deep"),
        ("port: 1\n---\nport: 2", "line 2: but found another document"),
        ("port: 'x\n", "line 2: found unexpected end of stream"),
        ("- port", "line 1: not a mapping of options to values"),
        ("? [a]\n: b", "line 1: no such option: "),
        ("\x1b[2J: 1", "s.yaml: unacceptable character #x001b"),
        (b"model: \xff", "s.yaml is not UTF-8"),
        ("#" * (1 << 20) + "\n", "s.yaml is larger than 1 MiB"),
    ],
)
def test_what_is_wrong_in_a_file_is_refused_by_place(read, capsys, text, error):
    with pytest.raises(SystemExit) as end:
        read(text)
    said = capsys.readouterr().err
    assert end.value.code == 2 and error in said and len(said.splitlines()) == 2


def test_a_file_that_cannot_be_read_and_a_wrong_variable_are_named(read, capsys, tmp_path):
    for arguments, variables, error in (
        (["--config", str(tmp_path)], {}, f"--config {tmp_path}: Is a directory"),
        (["--config="], {}, "--config .: Is a directory"),
        ([], {"NANOPAGE_CONFIG": "/no/such"}, "--config /no/such: No such file"),
        ([], {"NANOPAGE_MAX_QUEUE": "0"}, "NANOPAGE_MAX_QUEUE: 0 is not at least 1"),
        ([], {"NANOPAGE_PORT": "tcp://10.0.0.1:80"}, "enableServiceLinks: false"),
    ):
        with pytest.raises(SystemExit):
            read_options(serve.parser(), arguments, variables)
        assert error in capsys.readouterr().err
    with pytest.raises(SystemExit):  # of another program
        read("port: 1", "-i", "a", "-o", "b", parser=batch.parser())
    assert "no such option: port" in capsys.readouterr().err
    assert read("max_num_seqs: 3", "-i", "a", "-o", "b", parser=batch.parser()).max_num_seqs == 3


def test_variables_of_no_option_are_named():
    of_others = ["NANOPAGE_COMPILE", "NANOPAGE_HISTORY", "NANOPAGE_FUZZ_SEED", "NANOPAGE_LONG_TESTS", "HOME"]
    mistyped, other = "NANOPAGE_MAX_MODLE_LEN", "NANOPAGE_zzz"
    variables = dict.fromkeys([mistyped, other, "NANOPAGE_PORT", *of_others], "1")
    first, second = unknown_variables(serve.parser(), variables)
    assert first.endswith(f" {mistyped} belongs to no option. Did you mean --max-model-len?")
    assert second.endswith(f" {other} belongs to no option")
    names = {
        name
        for folder in ("nanopage", "tests", "benchmarks")
        for file in ROOT.glob(f"{folder}/**/*.py")
        for name in re.findall(r'"(NANOPAGE_[A-Z_]+)"', file.read_text())
    } - {*variables}
    assert unknown_variables(serve.parser(), dict.fromkeys(names, "1")) == []
    assert "NANOPAGE_CLIENTS" in names


def test_environment_md_lists_every_variable():
    listed = re.findall(r"`(NANOPAGE_\w+)`", (ROOT / "docs" / "environment.md").read_text())
    expected = [*map(variable_of, options_of(serve.parser())), "NANOPAGE_COMPILE", "NANOPAGE_HISTORY"]
    assert sorted(listed) == sorted(expected)


def test_an_error_is_two_lines_with_a_suggestion(capsys):
    for line, error in (
        ("--max-modle-len 5", "nanopage serve: error: no such option: --max-modle-len. Did you mean --max-model-len?"),
        ("--prot=80", "nanopage serve: error: no such option: --prot. Did you mean --port?"),
        ("--zzz\x1b[2J", "nanopage serve: error: no such option: --zzz\\x1b[2J"),
        ("a b", "nanopage serve: error: unrecognized arguments: b"),
    ):
        with pytest.raises(SystemExit) as end:
            serve.parser().parse_args(line.split())
        assert end.value.code == 2
        assert capsys.readouterr().err == f"{error}\nTry 'nanopage serve --help' for help.\n"
