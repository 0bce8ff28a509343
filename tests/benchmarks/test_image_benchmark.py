"""The benchmark of a model that sees images, with a tiny one."""

import json

from benchmarks.images import CONFIG, make_directory, measure


def test_both_engines_answer_and_the_second_turn_is_measured_with_and_without_caches(tmp_path, one_thread):
    config = json.loads((CONFIG / "config.json").read_text())
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config["vision_config"] |= sizes | {"image_size": 32, "patch_size": 4}
    config["text_config"] |= sizes | {"head_dim": 16, "num_key_value_heads": 1}
    (source := tmp_path / "config").mkdir()
    (source / "config.json").write_text(json.dumps(config))
    edges = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    (source / "preprocessor_config.json").write_text(json.dumps(edges))
    make_directory(source, tmp_path / "made")
    found = measure(tmp_path / "made", "float32", num_iters=1, num_tokens=3, eager=True)
    assert len(found) == 5 and all(numbers["ttft"] > 0 < numbers["rate"] for numbers in found.values())
