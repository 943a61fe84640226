"""Reports: all that was measured, in files and in one page that is safe and opens without a network."""

import csv
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from command_runs import fails
from sweep_folders import BAD_GUIDE, BETAS, COST, GUIDES, HOSTILE, Page, lines_of, make_run, svg_texts, write_lines

from radq.cli import main
from radq.errors import OptionError
from radq.report.results import read_runs
from radq.report.write import write_report

pytestmark = pytest.mark.slow

SHOWN_HOSTILE = HOSTILE.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a hostile guide, and its report with the paper's numbers."""
    folder = make_run(tmp_path_factory.mktemp("runs") / "detox", GUIDES | {BAD_GUIDE: 0.6, "_low": 0.9}, seeds=(0, 1))
    assert main(["report", str(folder), "--published"]) == 0
    return folder


# --- what is in it ---


def test_plots_of_a_run(run: Path) -> None:
    for group in ("all", "neutral", "negative"):
        svg = (run / "plots" / f"tradeoff-{group}.svg").read_text()
        text = svg_texts(svg)
        assert all(guide in text for guide in [*GUIDES, BAD_GUIDE, "_low", "none (unguided)"])
        assert all(f"\n{beta:g}\n" in text for beta in BETAS)
        assert ("MAUVE" in text) == (group == "all")  # not measured elsewhere
        assert "RAD-V, k=20 (paper: GPT-2-Large, Perspective)" in text
        assert "k=40" not in text  # the run has none
        assert ("DistilBERT" in text) == (group != "all")  # sentiment has classes of prompts
        assert (run / "plots" / f"tradeoff-{group}.png").read_bytes().startswith(b"\x89PNG")
    pairs = svg_texts((run / "plots" / "differences.svg").read_text())
    assert "not told apart from rad-v, all" in pairs
    assert f"better than {BAD_GUIDE}, negative" in pairs
    assert "avg_max: rad-q minus the other guide at equal perplexity (← better)" in pairs
    assert "rad-v − dexperts" not in pairs  # ours against each, not all pairs


def test_csv_holds_the_metrics(run: Path) -> None:
    endings = {"value": "", "low": "_low", "high": "_high", "skipped": "_skipped", "infinite": "_infinite"}
    with (run / "tables" / "results.csv").open(newline="") as lines:
        table = list(csv.DictReader(lines))
    rows = lines_of(run / "metrics.jsonl")
    assert len(table) == len(rows)
    for found, row in zip(table, rows, strict=True):
        assert {name: found[name] for name in ("guide", "group")} == {"guide": row["guide"], "group": row["group"]}
        assert found["beta"] == ("" if row["beta"] is None else str(row["beta"]))
        for name, estimate in row["metrics"].items():
            for part, ending in endings.items():
                if estimate is None:
                    assert found[name + ending] in ("", "0")
                else:
                    assert float(found[name + ending]) == estimate[part]
        assert all(float(found[name]) == value for name, value in COST.items())


def test_nothing_to_plot(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", groups=("all",))
    rows = [row | {"metrics": {"avg_max": row["metrics"]["avg_max"]}} for row in lines_of(folder / "metrics.jsonl")]
    write_lines(folder / "metrics.jsonl", rows)
    write_lines(folder / "differences.jsonl", [])
    report = write_report([folder])
    assert report.plots == []
    assert "nothing to plot" in report.page.read_text()


def test_classes_may_be_called_anything(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"rad-q": 1.0}, ("all", "../x y", "..x/y", "<b>", "日本"))
    write_report([folder])
    names = sorted(file.stem for file in (folder / "plots").glob("*.svg"))
    assert names == ["tradeoff-4", "tradeoff-all", "tradeoff-b", "tradeoff-x-y-1", "tradeoff-x-y-2"]


def test_published_judge_and_base_of_a_run(tmp_path: Path) -> None:
    config = "base: meta-llama/Llama-2-7b-hf\njudges: ['not:classifier:nicholasKluge/ToxicityModel']\n"
    folder = make_run(tmp_path / "run", {"rad-q": 1.0}, groups=("all",), config=config)
    write_report([folder], published=True)
    text = svg_texts((folder / "plots" / "tradeoff-all.svg").read_text())
    assert "RAD-V (paper: LLaMA-2-7b, ToxicityModel)" in text
    assert "Perspective" not in text


def test_guides_without_a_common_range(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"rad-q": 1.0, "rad-v": 1.1}, groups=("all",))
    rows = lines_of(folder / "differences.jsonl")
    nothing = dict.fromkeys(("value", "low", "high", "perplexity"))
    rows[0] |= nothing | {"reason": "the guides have no common perplexity."}
    write_lines(folder / "differences.jsonl", rows)
    report = write_report([folder])
    page = "".join(Page(report.page.read_text()).texts)
    assert "not compared with rad-v: the guides have no common perplexity" in page  # the run's own reason
    assert "hold no comparison" not in page
    assert report.comparisons == [
        "At equal perplexity rad-q cannot be told apart from rad-v in positive_rate on all prompts."
    ]


def test_torn_last_lines_are_noted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", groups=("all",))
    for name in ("metrics.jsonl", "differences.jsonl", "generations.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"cell": "rad')
    report = write_report([folder])
    assert len(report.notes) == 3
    assert all("the last line is cut off" in note for note in report.notes)
    assert "the last line is cut off" in report.page.read_text()


def test_a_bare_run_is_enough(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", groups=("all",))
    for name in ("differences.jsonl", "generations.jsonl", "config.yaml"):
        (folder / name).unlink()
    report = write_report([folder])
    assert [note.split("has no ")[1] for note in report.notes] == ["differences.jsonl.", "generations.jsonl."]
    page = "".join(Page(report.page.read_text()).texts)
    assert "The runs hold no comparison of rad-q and rad-v, rad-q and dexperts." in page
    assert "The run folders hold no texts of the measured cells." in page
    assert "sweep β" not in page  # nobody knows why they are missing
    assert "differences.jsonl of the run folder" not in page


def test_runs_side_by_side(tmp_path: Path) -> None:
    first = make_run(tmp_path / "first", {"rad-q": 1.0, "rad-v": 1.1}, groups=("all",))
    second = make_run(tmp_path / "second", {"rad-q": 1.0, "gedi": 0.7}, groups=("all",))
    report = write_report([first, second], tmp_path / "both")
    assert report.guides == ["first/none", "first/rad-q", "rad-v", "second/none", "second/rad-q", "gedi"]
    assert report.page == tmp_path / "both" / "report.html"
    assert not (first / "report.html").exists()
    text = svg_texts((tmp_path / "both" / "plots" / "tradeoff-all.svg").read_text())
    assert all(guide in text for guide in report.guides)
    page = report.page.read_text()
    assert "At equal perplexity first/rad-q cannot be told apart from rad-v in avg_max on all prompts." in page
    assert "At equal perplexity second/rad-q is better than gedi in avg_max on all prompts." in page
    assert "Guides of different runs are not compared" in page
    assert page.count("<summary><b>") == 5  # both have the same prompts
    namesakes = read_runs([first, shutil.copytree(second, tmp_path / "other" / "first")])
    assert {result.guide for result in namesakes[1].results} >= {f"{tmp_path / 'other' / 'first'}/rad-q", "gedi"}


def test_texts_stand_side_by_side_at_the_strengths_of_the_headlines(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"rad-q": 1.0, "rad-v": 1.1}, groups=("all",))
    html = write_report([folder]).page.read_text()
    prompt = html.split("<summary><b>")[1]
    shown, rest = prompt.split('<details class="rest">')
    titles = re.findall(r"<h4>([^<]*)</h4>", shown)
    assert titles == ["none (unguided), k=20", "rad-q, k=20, β = 100", "rad-v, k=20, β = 100"]
    assert "rad-q at β = 100" in html.split("<nav>")[0]
    assert sorted(re.findall(r"<h4>([^<]*)</h4>", rest)) == [
        f"{guide}, k=20, β = {beta}" for guide in ("rad-q", "rad-v") for beta in (10, 300, 50)
    ]
    colours = re.findall(r"border-color: (#\w{6})", shown)
    assert len(colours) == len(set(colours)) == 2
    svg = (folder / "plots" / "tradeoff-all.svg").read_text()
    assert all(colour in svg for colour in colours)  # the colours of the curves


# --- the page ---


def test_the_page_is_safe_and_needs_nothing(run: Path) -> None:
    html = (run / "report.html").read_text()
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert all(
        value.startswith("#")
        for name, value in page.attributes
        if name in ("src", "href", "xlink:href", "srcset", "data")
    )
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert not any("http" in value for name, value in page.attributes if name != "http-equiv")
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = {value[1:] for name, value in page.attributes if name in ("href", "xlink:href")}
    assert links <= set(ids)
    assert set(re.findall(r"url\(#([^)]*)\)", html)) <= set(ids)
    text = "".join(page.texts)
    assert BAD_GUIDE in text
    assert SHOWN_HOSTILE in text


def test_the_page_says_it_all(run: Path) -> None:
    text = "".join(Page((run / "report.html").read_text()).texts)
    assert f"none, rad-q, rad-v, dexperts, {BAD_GUIDE}, _low" in text
    assert "100 all prompts, 100 neutral prompts, 100 negative prompts, 6 samples of each" in text
    assert (
        "rad-q at β = 100 lowers avg_max from 0.382 (unguided) to 0.181 on 100 all prompts "
        "(−0.201 [−0.211, −0.191]), at 1.24 times the unguided perplexity."
    ) in text
    assert (
        f"At equal perplexity rad-q is better than dexperts and {BAD_GUIDE}, and it cannot be told apart from rad-v "
        "and _low in avg_max on all prompts."
    ) in text
    assert "Less counts as better for avg_max: the guides lower it from the unguided base model's." in text
    assert "More counts as better for positive_rate: the guides raise it" in text
    assert "Comparisons of other guides with each other are in differences.jsonl" in text
    assert "the highest score of a prompt's samples, averaged over prompts" in text
    assert "base: gpt2-large" in text
    assert "Calls per token in the paper: GeDi 1, DExperts 2, RAD-V k, RAD-Q 1." in text
    assert "blank samples" in text
    assert " text 2 of rad-v β=300.0 k=20 seed=0" in text
    assert " text 3 of " not in text
    assert "seed=1" not in text.split("Samples")[-1]


def test_a_report_is_the_same_twice_and_overwrites(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", groups=("all",))
    first = write_report([folder], tmp_path / "out", published=True)
    before = {file: file.read_bytes() for file in (first.page, *first.plots, *first.tables)}
    assert write_report([folder], tmp_path / "out", published=True) == first
    assert {file: file.read_bytes() for file in before} == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["plots", "report.html", "tables"]


# --- the command ---


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", {"rad-q": 1.0}, groups=("positive",))
    assert main(["report", str(folder), "--json", "--out", str(tmp_path / "out"), "--published"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["guides"] == ["none", "rad-q"]
    assert document["cells"] == 1 + len(BETAS)
    assert document["runs"]["run"]["base model"] == "gpt2-large"
    assert {change["metric"] for change in document["changes"]} >= {"avg_max", "perplexity"}
    files = [document["page"], *document["plots"], *document["tables"]]
    assert all(Path(file).is_file() for file in files)
    assert len(files) == 6
    assert main(["report", str(folder)]) == 0
    assert f"report of 5 cells of none, rad-q → {folder / 'report.html'}" in capsys.readouterr().out


def test_the_command_says_how_our_guide_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", groups=("all",))
    sentence = (
        "At equal perplexity rad-q is better than rad-v, and it is worse than dexperts in avg_max on all prompts."
    )
    rows = lines_of(folder / "differences.jsonl")
    for row in rows:  # less avg_max is better, since all guides lower it
        row |= {"rad-v": {"value": -0.02, "low": -0.03, "high": -0.01}, "dexperts": {"low": 0.01}}.get(
            row["second"], {}
        )
    write_lines(folder / "differences.jsonl", rows)
    assert main(["report", str(folder)]) == 0
    assert sentence in capsys.readouterr().out.splitlines()
    assert main(["report", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["comparisons"] == [sentence]


def test_published_numbers_that_match_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", {"rad-q": 1.0}, groups=("all",))
    rows = lines_of(folder / "metrics.jsonl")
    for row in rows:
        row["metrics"] = {"mean_score": row["metrics"]["avg_max"], "perplexity": row["metrics"]["perplexity"]}
    write_lines(folder / "metrics.jsonl", rows)
    assert main(["report", str(folder), "--published"]) == 0
    assert "note: the paper has no numbers" in capsys.readouterr().out


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", {"rad-q": 1.0}, groups=("all",))
    assert "there is no run" in fails(capsys, "report")
    assert "radq eval" in fails(capsys, "report", str(tmp_path))
    assert "radq eval" in fails(capsys, "report", str(tmp_path / "nowhere"))
    assert "given twice" in fails(capsys, "report", str(folder), str(folder / ".." / "run"), "--out", "x")
    other = make_run(tmp_path / "other", {"rad-q": 1.0}, groups=("all",))
    assert "--out" in fails(capsys, "report", str(folder), str(other))
    generations = (folder / "generations.jsonl").read_text()
    (folder / "generations.jsonl").write_text("nonsense\n" + generations)
    assert "generations.jsonl, line 1 is not JSON: 'nonsense'" in fails(capsys, "report", str(folder))
    (folder / "generations.jsonl").write_text(generations.replace('"continuations": [', '"continuations": [3, ', 1))
    assert "generations.jsonl, line 1: continuations" in fails(capsys, "report", str(folder))
    (folder / "metrics.jsonl").write_text("")
    assert "has no results" in fails(capsys, "report", str(folder))
    assert not (folder / "report.html").exists()
    with pytest.raises(OptionError):
        write_report([])


# --- a browser ---

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OFFLINE = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-dev-shm-usage "
    "--enable-logging=stderr --hide-scrollbars --window-size=1280,2400"
).split()
PROBE = """<script>
for (const text of document.querySelectorAll("figure svg text")) {
  const box = text.getBoundingClientRect();
  const shown = text.checkVisibility() && box.width > 0 && box.left >= 0 && box.right <= innerWidth;
  text.setAttribute("data-shown", shown ? "yes" : "no");
}
document.body.setAttribute("data-wide", document.documentElement.scrollWidth > innerWidth ? "yes" : "no");
</script></body>"""


def browse(file: Path, *options: str) -> tuple[str, list[str]]:
    """What the browser prints, and what it has to say on its console, without a network."""
    assert BROWSER is not None
    offline = [*OFFLINE, "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={file.parent / 'profile'}"]
    command = [BROWSER, *offline, *options, file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_in_a_browser(run: Path, tmp_path: Path) -> None:
    html = (run / "report.html").read_text()
    page = tmp_path / "report.html"
    page.write_text(html)
    dom, console = browse(page, "--dump-dom")
    assert console == []
    assert dom.rstrip().endswith("</html>")
    _, console = browse(page, f"--screenshot={tmp_path / 'page.png'}")
    assert console == []
    assert (tmp_path / "page.png").stat().st_size > 50_000
    probe = tmp_path / "probe.html"  # a copy that may run a script, to measure what is seen
    probe.write_text(re.sub(r"<meta http-equiv[^>]*>", "", html).replace("</body>", PROBE))
    dom, console = browse(probe, "--dump-dom")
    assert console == []
    assert 'data-wide="no"' in dom
    figures = re.findall(r"<figure>.*?</figure>", dom, re.DOTALL)
    assert len(figures) == 4  # three classes of prompts, and the pairs of guides
    guides = [*GUIDES, BAD_GUIDE, "_low", "none (unguided)"]
    for figure in figures[:3]:
        shown = Page("".join(re.findall(r'<text[^>]*data-shown="yes".*?</text>', figure, re.DOTALL))).texts
        assert all(f"{guide}, k=20" in shown for guide in guides)
    assert 'data-shown="no"' not in "".join(figures)


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_the_policy_stops_scripts(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(
        (run / "report.html").read_text().replace("</body>", "<script>document.title = 'x'</script></body>")
    )
    dom, console = browse(page, "--dump-dom")
    assert "<title>x</title>" not in dom
    assert "Content Security Policy" in console[0]
