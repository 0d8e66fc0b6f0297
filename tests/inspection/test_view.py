"""`braid view` without a browser: the index, the server's answers and refusals, the page's files, the report."""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.client
import json
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from braid.cli.main import OK, USAGE, main
from braid.inspection.folder import Run
from braid.inspection.view.answers import Answers, BadQuestion, Missing
from braid.inspection.view.index import Filter, Index
from braid.inspection.view.report import joined_scripts, write_report
from braid.inspection.view.server import PAGE, SCRIPTS, Server
from braid.inspection.view.tokens import spans
from braid.report.samples import read_samples

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A run whose first trajectory of round 2 says HOSTILE."""
    folder = shutil.copytree(trained / "seed1", tmp_path / "runs/seed1")
    file = folder / "samples/round_000002.jsonl"
    first, *others = file.read_text().splitlines(keepends=True)
    record = json.loads(first)
    record["turns"][0] |= {"output_text": HOSTILE, "token_texts": [HOSTILE]}
    file.write_text(json.dumps(record, ensure_ascii=False) + "\n" + "".join(others))
    return folder


@pytest.fixture
def answers(run: Path) -> Iterator[Answers]:
    one = Answers([run])
    yield one
    one.close()


@pytest.fixture
def server(answers: Answers) -> Iterator[Server]:
    one = Server(answers)
    thread = threading.Thread(target=one.serve_forever)
    thread.start()
    yield one
    one.shutdown()
    thread.join()
    one.server_close()


def ask(
    server: Server, path: str, *, token: str | None = None, method: str = "GET", **headers: str
) -> tuple[int, bytes, http.client.HTTPMessage]:
    """(status, body, headers) of a request for a path below the token, the server's own by default."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request(method, f"/{server.token if token is None else token}/{path}", headers=headers)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply.status, body, reply.headers


# The index


def lines_of(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples" / name).read_text().splitlines()]


def test_the_index_has_every_trajectory_of_every_file(run: Path) -> None:
    index = Index(run)
    index.refresh()
    counted = {(one["stage"], one["round"]): one["num"] for one in index.rounds()}
    files = sorted((run / "samples").glob("*.jsonl"))
    assert counted == {
        (file.stem.split("_")[0], int(file.stem.split("_")[1])): len(file.read_text().splitlines())
        for file in files
    }
    for line, stored in enumerate(lines_of(run, "round_000001.jsonl")):
        assert index.record("round", 1, line) == stored
    rewards = [one["reward"] for one in lines_of(run, "round_000001.jsonl") if one["reward"] is not None]
    (about,) = (one for one in index.rounds() if (one["stage"], one["round"]) == ("round", 1))
    assert about["reward"] == pytest.approx(sum(rewards) / len(rewards))
    index.close()


def test_the_index_follows_files_that_change_and_are_removed(run: Path) -> None:
    index = Index(run)
    index.refresh()
    first, second = (run / f"samples/round_{number:06d}.jsonl" for number in (1, 2))
    second.unlink()
    first.write_text(first.read_text().splitlines(keepends=True)[0] + "{cut sho")
    index.refresh()
    rounds = {one["round"]: one for one in index.rounds() if one["stage"] == "round"}
    assert list(rounds) == [1]
    assert (rounds[1]["num"], rounds[1]["unreadable"]) == (1, 1)
    assert index.select(Filter("round", 2))["num"] == 0
    index.close()
    again = Index(run)  # from its file
    assert [one["round"] for one in again.rounds() if one["stage"] == "round"] == [1]
    again.close()


def test_a_damaged_index_is_built_again(run: Path) -> None:
    (run / ".index.sqlite").write_bytes(b"no database" * 1000)
    index = Index(run)
    index.refresh()
    assert index.select(Filter("round", 1))["num"] == len(lines_of(run, "round_000001.jsonl"))
    index.close()


def test_an_index_that_cannot_be_written_is_kept_in_memory(run: Path) -> None:
    (run / ".index.sqlite").mkdir()
    index = Index(run)
    index.refresh()
    assert index.rounds()
    index.close()


def test_trajectories_are_chosen_by_reward_length_status_source_prompt_and_text(run: Path) -> None:
    index = Index(run)
    index.refresh()
    stored = lines_of(run, "round_000001.jsonl")

    def lines(**choice: Any) -> list[int]:
        return [row["line"] for row in index.select(Filter("round", 1, **choice), limit=1000)["rows"]]

    def those(rule: Any) -> list[int]:
        return [line for line, one in enumerate(stored) if rule(one)]

    def length(one: dict[str, Any]) -> int:
        return sum(len(turn["output_ids"]) for turn in one["turns"])

    best = max(one["reward"] for one in stored if one["reward"] is not None)
    assert lines(min_reward=best) == those(lambda one: one["reward"] == best)
    assert lines(max_reward=best - 1e-9) == those(
        lambda one: one["reward"] is not None and one["reward"] < best
    )
    assert lines(min_length=2, max_length=3) == those(lambda one: 2 <= length(one) <= 3)
    assert lines(status="truncated") == those(lambda one: one["status"] == "truncated")
    assert lines(source=stored[0]["source"]) == those(lambda one: one["source"] == stored[0]["source"])
    assert lines(source="none") == []
    assert lines(uid=stored[0]["uid"]) == those(lambda one: one["uid"] == stored[0]["uid"])
    text = stored[-1]["turns"][0]["output_text"]
    assert lines(text=text.upper()) == those(
        lambda one: text.lower() in (one["prompt"]["text"] + "\n" + one["turns"][0]["output_text"]).lower()
    )
    assert index.select(Filter(text=HOSTILE))["num"] == 1
    assert lines(text='"reward"') == []  # only texts are searched, not the file's keys
    ordered = [row["reward"] for row in index.select(Filter("round", 1), order="best", limit=1000)["rows"]]
    assert ordered == sorted(ordered, key=lambda one: (one is None, -(one or 0)))
    first, second = (index.select(Filter("round", 1), limit=3, offset=offset)["rows"] for offset in (0, 3))
    assert [row["line"] for row in first + second] == [0, 1, 2, 3, 4, 5]
    index.close()


# Answers


def test_metrics_are_those_of_the_file_with_their_meaning(answers: Answers, run: Path) -> None:
    table = answers("metrics", {"run": "0"})
    for i, line in enumerate(Run(run).lines):
        assert {name: values[i] for name, values in table["columns"].items() if values[i] is not None} == {
            name: value for name, value in line.items() if value is not None
        }
    assert table["about"]["reward/mean"]["meaning"].startswith("Mean reward")
    assert "reward/mean" in table["first"]


def test_a_trajectory_has_its_numbers_by_token(answers: Answers, run: Path) -> None:
    for line, sample in enumerate(read_samples(run / "samples/round_000001.jsonl")):
        whole = answers("trajectory", {"run": "0", "stage": "round", "round": "1", "line": str(line)})
        (turn,), (stored,) = whole["turns"], sample.trajectory.turns
        assert turn["ids"] == stored.output_ids
        assert "".join(turn["tokens"]) == turn["output"] == sample.output_texts[0]
        assert turn["numbers"]["logprob"] == stored.logprobs
        assert turn["numbers"]["version"] == [0] * len(stored.output_ids)
        if sample.training:
            assert turn["numbers"]["advantages"] == sample.training["advantages"]


def test_training_values_go_to_the_turns_of_trained_contexts() -> None:
    from braid.inspection.view.tokens import turns_of

    def turn(num: int) -> dict[str, Any]:
        return {
            "output_ids": [1] * num,
            "output_text": "x" * num,
            "logprobs": [0.0] * num,
            "policy_version": [[1, 1], [2, num - 1]],
        }

    record = {
        "turns": [turn(2), turn(3), turn(2)],
        "segments": [
            {"agent": "a", "num_turns": 1, "is_trained": True},
            {"agent": "b", "num_turns": 1, "is_trained": False},
            {"agent": "a", "num_turns": 1, "is_trained": True},
        ],
        "training": {"advantages": [1.0, 2.0, 3.0, 4.0], "short": [1.0]},
    }
    first, second, third = turns_of(record)
    assert first["numbers"]["advantages"] == [1.0, 2.0]
    assert "advantages" not in second["numbers"]
    assert third["numbers"]["advantages"] == [3.0, 4.0]
    assert third["numbers"]["version"] == [1, 2]
    assert second["agent"] == "b"
    assert "short" not in first["numbers"]
    assert first["tokens"] is None


@pytest.mark.parametrize(
    ("text", "tokens", "parts"),
    [
        ("ab c", ["a", "b", " c"], ["a", "b", " c"]),
        ("the cat", ["the", "cat"], ["the", " cat"]),  # SentencePiece: a token alone loses its space
        ("é!", ["�", "�", "!"], ["é", "", "!"]),
        ("x👍", ["x", "�", "�"], ["x", "👍", ""]),
        ("a", ["a", ""], ["a", ""]),
        ("zz", ["a", "b"], ["zz", ""]),
        ("", [], []),
    ],
)
def test_a_text_is_divided_among_its_tokens(text: str, tokens: list[str], parts: list[str]) -> None:
    assert spans(text, tokens) == parts


def test_evaluations_are_compared_by_prompt(answers: Answers) -> None:
    rounds = [one["round"] for one in answers("rounds", {"run": "0"})["rounds"] if one["stage"] == "eval"]
    values = {
        "run": "0",
        "round": str(rounds[0]),
        "other_run": "0",
        "other_round": str(rounds[-1]),
        "stage": "eval",
    }
    assert answers("change", values)["wins"]["num_prompts"] == 4


def test_configs_are_compared_by_key(trained: Path, tmp_path: Path) -> None:
    both = Answers([shutil.copytree(trained / f"seed{seed}", tmp_path / f"seed{seed}") for seed in (1, 2)])
    answer = both("config", {})
    assert answer["differing"] == ["run.seed"]
    assert answer["rows"]["run.seed"] == ["1", "2"]
    assert [one["name"] for one in both("runs", {})] == ["seed1", "seed2"]
    both.close()


def test_a_run_that_goes_on_says_what_changed(answers: Answers, run: Path) -> None:
    (before,) = answers("runs", {})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "reward/mean": 0.25}\n')
    (after,) = answers("runs", {})
    assert before["changed"]["metrics"] != after["changed"]["metrics"]
    assert before["changed"]["samples"] == after["changed"]["samples"]
    assert answers("metrics", {"run": "0"})["columns"]["reward/mean"][-1] == 0.25


@pytest.mark.parametrize(
    ("question", "values", "kind", "message"),
    [
        ("list", {}, BadQuestion, "lacks run"),
        ("list", {"run": "-1"}, BadQuestion, "run=-1: must be a whole number"),
        ("list", {"run": "7"}, Missing, "no run 7"),
        ("list", {"run": "0", "order": "oldest"}, BadQuestion, "must be one of file, best"),
        ("list", {"run": "0", "limit": "5000"}, BadQuestion, "at most 1000"),
        ("list", {"run": "0", "min_reward": "nan"}, BadQuestion, "must be a number"),
        ("list", {"run": "0", "colour": "red"}, BadQuestion, "does not have colour"),
        ("list", {"run": "0", "stage": "../x"}, BadQuestion, "must be one of round, eval"),
        ("trajectory", {"run": "0", "stage": "round", "round": "1", "line": "9999"}, Missing, "line 9999"),
        ("trajectory", {"run": "0", "stage": "round", "round": "77", "line": "0"}, Missing, "round 77"),
        (
            "change",
            {"run": "0", "round": "1", "other_run": "0", "other_round": "9", "stage": "round"},
            Missing,
            "9",
        ),
        ("secrets", {}, Missing, "there are runs, metrics"),
    ],
)
def test_questions_without_an_answer_are_refused(
    answers: Answers, question: str, values: dict[str, str], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        answers(question, values)


# The server


def test_the_page_and_its_files_are_served_under_the_token(server: Server) -> None:
    status, body, headers = ask(server, "")
    assert status == 200
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    for path in re.findall(r'(?:src|href)="(assets/[^"]+)"', body.decode()):
        assert ask(server, path)[0] == 200, path
    for name in SCRIPTS:
        for other in re.findall(r'from "\./([\w.]+)"', PAGE.joinpath(f"app/{name}").read_text()):
            assert ask(server, f"assets/{other}")[2]["Content-Type"].startswith("text/javascript")


def test_requests_without_the_token_or_for_another_host_are_refused(server: Server) -> None:
    for token in ("", "x", server.token[:-1], server.token.upper(), server.token + "x", "%00"):
        assert ask(server, "api/runs", token=token)[0] == 403, token
    for host in ("evil.example", "127.0.0.1.evil.example", f"evil.example:{server.server_address[1]}", ""):
        assert ask(server, "api/runs", Host=host)[0] == 403, host
    assert ask(server, "api/runs", Host="localhost:9")[0] == 200  # a forwarded port
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, "api/runs", method=method)[0] == 501


def test_the_server_listens_on_this_machine_alone(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "path",
    [
        "../etc/passwd",
        "assets/../server.py",
        "assets/..%2Fserver.py",
        "assets/lock.json",
        "files/0/images/..%2F..%2Fconfig.yaml",
        "files/0/images/../../config.yaml",
        "files/0/video/%2Fetc%2Fpasswd",
        "files/0/video/.hidden.mp4",
        "files/0/video/link.mp4",
        "files/0/video/notes.txt",
        "files/-1/video/a.mp4",
        "files/0/checkpoints/a.mp4",
        "config.yaml",
    ],
)
def test_only_the_pages_files_and_pictures_of_runs_are_served(server: Server, run: Path, path: str) -> None:
    (run / "video").mkdir()
    (run / "video/link.mp4").symlink_to(run / "config.yaml")
    for name in (".hidden.mp4", "notes.txt"):
        (run / "video" / name).write_text("no")
    assert ask(server, path)[0] == 404


def test_videos_are_served_whole_and_by_range(server: Server, run: Path) -> None:
    (run / "video").mkdir()
    (run / "video/eval_000001.mp4").write_bytes(b"0123456789")
    assert json.loads(ask(server, "api/rounds?run=0")[1])["videos"] == ["eval_000001.mp4"]
    path = "files/0/video/eval_000001.mp4"
    status, body, headers = ask(server, path)
    assert (status, body, headers["Content-Type"]) == (200, b"0123456789", "video/mp4")
    status, body, headers = ask(server, path, Range="bytes=2-4")
    assert (status, body, headers["Content-Range"]) == (206, b"234", "bytes 2-4/10")
    assert ask(server, path, Range="bytes=8-")[1] == b"89"
    assert ask(server, path, Range="bytes=20-")[0] == 416


def test_texts_of_a_model_are_data_and_never_html(server: Server) -> None:
    status, body, headers = ask(server, "api/trajectory?run=0&stage=round&round=2&line=0")
    assert (status, headers["Content-Type"]) == (200, "application/json; charset=utf-8")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert json.loads(body)["turns"][0]["output"] == HOSTILE
    status, body, headers = ask(server, "api/list?" + urlencode({"run": 0, "text": HOSTILE}))
    assert json.loads(body)["num"] == 1
    status, body, headers = ask(server, f"api/{quote(HOSTILE, safe='')}")
    assert (status, headers["Content-Type"]) == (404, "application/json; charset=utf-8")
    scripts = "".join(PAGE.joinpath(f"app/{name}").read_text() for name in SCRIPTS)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|Function\(", scripts)


def test_the_command_serves_until_it_is_interrupted(run: Path) -> None:
    command = [sys.executable, "-m", "braid", "view", str(run.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline()
        match = re.fullmatch(r"1 run at http://127\.0\.0\.1:(\d+)/([\w-]{20,})/\n", address)
        assert match, address
        connection = http.client.HTTPConnection("127.0.0.1", int(match[1]), timeout=30)
        connection.request("GET", f"/{match[2]}/api/runs")
        assert json.loads(connection.getresponse().read())[0]["name"] == "seed1"
        connection.close()
        process.terminate()
        assert process.wait(30) == OK


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path)]) == USAGE
    assert "so it is not a run" in capsys.readouterr().err


# The page's files


def test_vendored_files_are_those_of_the_lock() -> None:
    vendor = PAGE.joinpath("vendor")
    lock = json.loads(vendor.joinpath("lock.json").read_text())
    locked = {name: about for package in lock for name, about in package["files"].items()}
    assert {file.name for file in vendor.iterdir()} == {*locked, "lock.json"}
    for name, about in locked.items():
        digest = hashlib.sha512(vendor.joinpath(name).read_bytes()).digest()
        assert about["integrity"] == f"sha512-{base64.b64encode(digest).decode()}", name
    licences = {package["name"]: package["license"] for package in lock}
    assert licences == {"uplot": "MIT", "htm": "Apache-2.0", "preact": "MIT"}
    for package in lock:
        assert re.fullmatch(r"\d+\.\d+\.\d+", package["version"])
        assert any(name.startswith("LICENSE.") for name in package["files"])
    assert f"(v{lock[0]['version']})" in vendor.joinpath("uPlot.iife.min.js").read_text()


def test_the_page_and_its_files_are_at_most_100_kb_to_load(server: Server) -> None:
    status, page, headers = ask(server, "", **{"Accept-Encoding": "gzip"})
    assert (status, headers["Content-Encoding"]) == (200, "gzip")
    names = re.findall(r'"(assets/[^"]+)"', gzip.decompress(page).decode())
    names += [f"assets/{name}" for name in SCRIPTS if f"assets/{name}" not in names]
    sizes = {name: len(ask(server, name, **{"Accept-Encoding": "gzip"})[1]) for name in names}
    assert len(page) + sum(sizes.values()) <= 100_000, sizes


def test_modules_can_be_joined_into_one() -> None:
    joined = joined_scripts()
    assert not re.search(r"^(import|export)\b", joined, re.MULTILINE)
    names = Counter(re.findall(r"^(?:async )?(?:const|let|function|class) (\w+)", joined, re.MULTILINE))
    assert [name for name, num in names.items() if num > 1] == []
    assert set(SCRIPTS) == {file.name for file in PAGE.joinpath("app").iterdir() if file.name.endswith(".js")}


# The report


def embedded_in(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="answers">(.*?)</script>', page, re.DOTALL)
    assert match
    return json.loads(match[1])


def test_a_report_is_one_file_without_requests(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), "--report", str(tmp_path / "run.html")]) == OK
    page = (tmp_path / "run.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy
    assert "default-src 'none'" in policy[1]
    scripts = re.findall(r"<script(?: type=\"module\")?>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 3
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"\b(src|href)=|url\(|@import", markup)
    for script in scripts:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy[1]
    assert "<script>document" not in page
    data = embedded_in(page)
    assert data["trajectory run=0 stage=round round=2 line=0"]["turns"][0]["output"] == HOSTILE
    assert [one["round"] for one in data["rounds run=0"]["rounds"] if one["stage"] == "round"] == [1, 2]
    assert any(key.startswith("change ") for key in data)
    assert "note" not in data["runs"][0]


def test_a_report_that_would_be_too_large_has_the_last_rounds_and_says_so(run: Path, tmp_path: Path) -> None:
    num_bytes = (run / "samples/round_000002.jsonl").stat().st_size
    data = embedded_in(write_report(run, tmp_path / "run.html", num_bytes=num_bytes).read_text())
    kept = data["rounds run=0"]["rounds"]
    assert 0 < len(kept) < len(Run(run).samples("round")) + len(Run(run).samples("eval"))
    assert "without the trajectories of" in data["runs"][0]["note"]
    assert write_report(run, tmp_path / "none.html", num_bytes=0).stat().st_size > 100_000


def test_a_report_needs_a_place_and_takes_no_options_of_checkpoints(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "--report", str(tmp_path / "no/such.html")]) == USAGE
    assert "choose another file" in capsys.readouterr().err
    assert main(["export", str(run), "--report", "x.html", "--step", "1"]) == USAGE
    assert "--report is about the whole run" in capsys.readouterr().err
