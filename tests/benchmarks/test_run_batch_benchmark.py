"""benchmarks/run_batch.py notices what is wrong with an output."""

import json
import random

from benchmarks.run_batch import check, requests_of


def test_what_is_lost_there_twice_or_wrong_is_counted(tmp_path):
    lines, texts = requests_of(random.Random(0), 6, max_tokens=3), [f"text {number}" for number in range(6)]
    assert len({json.dumps(line["body"]) for line in lines}) == 6

    def output(number, text=None, status=200, place=None):
        said = text or texts[number]
        choice = {"message": {"content": said}} if number % 2 else {"text": said}
        body = {"choices": [choice], "usage": {"completion_tokens": 3}}
        place = number + 1 if place is None else place
        response = {"status_code": status, "body": body}
        return {"id": f"batch_req_{place}", "custom_id": str(number), "response": response, "error": None}

    def checked(*outputs):
        (tmp_path / "out").write_text("".join(json.dumps(each) + "\n" for each in outputs))
        return check(tmp_path / "out", lines, texts)

    fine = {"lost": 0, "twice": 0, "errors": 0, "other_texts": [], "output_tokens": 18}
    assert checked(*map(output, reversed(range(6)))) == fine
    wrong = output(1), output(1), output(2, "other"), output(3, status=500), output(4, place=4)
    unanswered = output(5) | {"response": None}
    expected = {"lost": 1, "twice": 1, "errors": 3, "other_texts": [2], "output_tokens": 9}
    assert checked(*wrong, unanswered) == expected
