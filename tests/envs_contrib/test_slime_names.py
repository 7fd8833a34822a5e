"""What slime's own names are here: its record of a rollout, its graders, its modules, its requests."""

from __future__ import annotations

import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from agentrl.errors import StageError
from envs_contrib.slime import Sample
from envs_contrib.slime.policy import HOST
from envs_contrib.slime.sample import label_of


def test_a_sample_keeps_its_own_books():
    sample = Sample(tokens=[1, 2])
    mask = sample.loss_mask = []
    stop = {"finish_reason": {"type": "stop"}, "weight_version": "4"}
    sample.append_response_tokens(tokens=[5, 6], log_probs=[-1, -2], meta_info=stop, text="ab")
    sample.append_response_tokens(tokens=[7], trainable=False, text="!")
    assert (sample.tokens, sample.response, sample.response_length) == ([1, 2, 5, 6, 7], "ab!", 3)
    assert sample.loss_mask is mask
    assert (mask, sample.rollout_log_probs, sample.effective_response_length) == (
        [1, 1, 0],
        [-1.0, -2.0, 0.0],
        2,
    )
    assert (sample.status, sample.weight_versions) == (Sample.Status.COMPLETED, ["4"])
    with pytest.raises(ValueError, match="tokens that are trained need a logprob each"):
        sample.append_response_tokens(tokens=[5])
    with pytest.raises(ValueError, match="tokens that are not trained have no logprobs"):
        sample.append_response_tokens(tokens=[5], log_probs=[0.0], trainable=False)
    sample.tool_call_count = 3
    again = Sample.from_dict(sample.to_dict())
    assert (again.tool_call_count, again.status, again.loss_mask) == (3, Sample.Status.COMPLETED, [1, 1, 0])


def test_dapos_score_is_that_of_the_grader():
    from slime.rollout.rm_hub.f1 import f1_score
    from slime.rollout.rm_hub.math_dapo_utils import compute_score
    from slime.rollout.rm_hub.math_utils import extract_answer

    assert compute_score("so\nAnswer: $34$", "34") == {"score": 1.0, "acc": True, "pred": "$34$"}
    assert compute_score("34", "34") == {"score": -1.0, "acc": False, "pred": "[INVALID]"}
    assert compute_score(r"so \boxed{5}.", "5", strict_box_verify=True)["score"] == 1.0
    assert compute_score(r"\boxed{5}" + " x" * 60, "5", strict_box_verify=True)["pred"] is None
    assert extract_answer(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert f1_score("the cat", "cat") == (1.0, 1.0, 1.0)
    assert f1_score("a big black cat", "cat") == (0.5, 1 / 3, 1.0)
    assert f1_score("yes it is", "yes") == (0.0, 0.0, 0.0)
    assert f1_score(None, "cat") == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("from slime.utils.types import Foo", "cannot import name 'Foo' from 'slime.utils.types'"),
        ("import slime.rollout.nothing", "No module named 'slime.rollout.nothing'"),
        ("import slime.utils.types as t; t.Foo", "slime.utils.types has no Foo here; it has Sample"),
        (
            "from slime.rollout.sglang_rollout import GenerateState as G; G(1).tokenizer",
            "there is no episode in play",
        ),
        (
            "from slime.rollout.sglang_rollout import get_model_url as g; g(1, 'judge')",
            "there is no model 'judge'",
        ),
    ],
)
def test_a_name_that_is_not_there_is_named(code, sentence):
    done = subprocess.run(
        [sys.executable, "-c", f"import envs_contrib.slime\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert sentence in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize("first", ["slime", "envs_contrib.slime"])
def test_an_installed_slime_is_behind_what_is_answered_here(tmp_path, first):
    (tmp_path / "slime" / "utils").mkdir(parents=True)
    (tmp_path / "slime" / "__init__.py").write_text("")
    (tmp_path / "slime" / "utils" / "__init__.py").write_text("")
    (tmp_path / "slime" / "utils" / "types.py").write_text("Sample = 'their own'")
    (tmp_path / "slime" / "utils" / "mask_utils.py").write_text("from .types import Sample")
    uses = "import envs_contrib.slime as e, slime.utils.mask_utils as m; print(m.Sample is e.Sample)"
    code = uses if first == "envs_contrib.slime" else f"import slime.utils.types; {uses}"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if first == "slime":
        assert "slime is imported already; import envs_contrib.slime before it." in done.stderr
    else:
        assert done.stdout == "True\n"


async def test_post_reaches_other_servers():
    from slime.utils.http_utils import post

    class Scores(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"got": ' + body + b"}")

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Scores)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert await post(f"http://127.0.0.1:{server.server_port}/", {"a": 1}) == {"got": {"a": 1}}
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(StageError, match="there is no episode in play"):
        await post(f"http://{HOST}/generate", {"text": "x"})


@pytest.mark.parametrize(
    ("answer", "metadata", "label"),
    [
        ("[1, 2]", {}, "[1, 2]"),
        ('{"target": ["x"]}', {}, {"target": ["x"]}),
        ("{1, 2}", {}, "{1, 2}"),
        ("x", {"answers": ["x", "y"]}, ["x", "y"]),
        (None, {}, None),
    ],
)
def test_a_label_is_that_of_the_row(answer, metadata, label):
    assert label_of(answer, metadata) == label
