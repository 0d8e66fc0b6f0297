// The page: its tabs, the choice of runs, the address, the keyboard, and following runs that go on.
import {
  Problem,
  ask,
  colorOf,
  duration,
  fileAddress,
  html,
  isReport,
  render,
  statusClass,
  useRounds,
  useEffect,
  useRef,
  useState,
} from "./base.js";
import { Curves } from "./curves.js";
import { Rollouts } from "./rollouts.js";
import { Change, Config } from "./change.js";
import { Timeline } from "./timeline.js";

const TABS = ["curves", "rollouts", "change", "timeline", "videos", "config"];
const POLL_MS = 2000;
const KEYS = [
  ["1 – 6", "tabs"],
  ["j  k", "next, previous trajectory"],
  ["l  h", "next, previous round"],
  ["g", "group side by side"],
  ["c", "next colour of tokens"],
  ["/", "find"],
  ["r", "next run"],
  ["?", "this list"],
];

/** The address's fragment as a place: tab, run, stage, round, line. */
function placeOf(fragment) {
  const [tab, run, stage, round, line] = fragment.slice(1).split("/");
  const whole = (text) => (/^\d+$/.test(text ?? "") ? Number(text) : null);
  return {
    tab: TABS.includes(tab) ? tab : "curves",
    run: whole(run) ?? 0,
    stage: ["round", "eval"].includes(stage) ? stage : null,
    round: whole(round),
    line: whole(line),
  };
}
const fragmentOf = ({ tab, run, stage, round, line }) =>
  "#" + [tab, run, stage, round, line].filter((part) => part !== null).join("/");

function Videos({ run, names }) {
  if (!names.length) return html`<p class="dim">This run has no videos (env.video).</p>`;
  if (isReport)
    return html`<p class="dim">
      ${`A report has no videos; they are in the folder video of the run: ${names.join(", ")}`}
    </p>`;
  return html`<div class="charts">
    ${names.map(
      (name) =>
        html`<div class="card" key=${name}>
          <div>${name}</div>
          ${name.endsWith(".mp4")
            ? html`<video controls preload="metadata" src=${fileAddress(run, "video", name)}></video>`
            : html`<img class="given" alt=${name} src=${fileAddress(run, "video", name)} />`}
        </div>`,
    )}
  </div>`;
}

function Page() {
  const [runs, setRuns] = useState(null),
    [error, setError] = useState(null);
  const [place, setPlace] = useState(placeOf(location.hash)),
    [hidden, setHidden] = useState(new Set());
  const [isHelp, setHelp] = useState(false),
    [scheme, setScheme] = useState(0);
  const keys = useRef({});
  useEffect(() => {
    const load = () =>
      ask("runs").then(
        (answer) => {
          setRuns((old) => (JSON.stringify(old) === JSON.stringify(answer) ? old : answer));
          setError(null);
        },
        () => setError("braid view no longer answers; start it again"),
      );
    load();
    if (!isReport) setInterval(() => document.hidden || load(), POLL_MS);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
      setScheme((old) => old + 1),
    );
    addEventListener("hashchange", () => setPlace(placeOf(location.hash)));
  }, []);
  const go = (change) => {
    const next = { ...place, ...change };
    setPlace(next);
    history.replaceState(null, "", fragmentOf(next));
  };
  const run = runs ? Math.min(place.run, runs.length - 1) : 0,
    current = runs?.[run];
  const [stored, storedError] = useRounds(
    runs ? run : null,
    current ? current.changed.samples + current.changed.video : "",
  );
  keys.current = {};
  useEffect(() => {
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Escape") {
        document.activeElement.blur();
        return setHelp(false);
      }
      if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
      const common = {
        "?": () => setHelp(!isHelp),
        r: () => runs && go({ run: (run + 1) % runs.length, line: null, round: null, stage: null }),
        "/": () => {
          event.preventDefault();
          document.getElementById("find")?.focus();
        },
      };
      const tab = TABS[Number(event.key) - 1];
      (keys.current[event.key] ?? common[event.key] ?? (tab && (() => go({ tab }))))?.();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  });
  if (!runs) return html`<main><${Problem} error=${error} /></main>`;
  const toggle = (i) => {
    if (place.tab !== "curves") return go({ run: i, stage: null, round: null, line: null });
    const next = new Set(hidden);
    next.has(i) ? next.delete(i) : next.add(i);
    setHidden(next);
  };
  const isOff = (i) => (place.tab === "curves" ? hidden.has(i) : i !== run && place.tab !== "config");
  const openRound = (round) => {
    const near = (stored?.rounds ?? [])
      .filter((one) => one.stage === "round" || round === 0)
      .sort((a, b) => Math.abs(a.round - round) - Math.abs(b.round - round))[0];
    if (near) go({ tab: "rollouts", stage: near.stage, round: near.round, line: null });
  };
  const props = {
    run,
    place,
    go,
    stored,
    runs,
    keys,
    changed: current.changed.metrics + current.changed.samples,
  };
  const tabs = {
    curves: () => html`<${Curves} runs=${runs} hidden=${hidden} onRound=${openRound} scheme=${scheme} />`,
    rollouts: () => html`<${Rollouts} key=${run} ...${props} />`,
    change: () => html`<${Change} key=${run} ...${props} />`,
    timeline: () => html`<${Timeline} key=${run} ...${props} />`,
    videos: () => html`<${Videos} run=${run} names=${stored?.videos ?? []} />`,
    config: () => html`<${Config} runs=${runs} />`,
  };
  return html`<header class="row">
      <b>braid</b>
      ${runs.map(
        (one, i) =>
          html`<button
            class=${`run ${isOff(i) ? "off" : ""}`}
            title=${one.error ?? one.path}
            onClick=${() => toggle(i)}
            key=${i}
          >
            <span class="dot" style=${`background:${colorOf(i)}`}></span><span>${one.name}</span>
            <span class=${statusClass(one.status)}>${String(one.status).replace("_", " ")}</span>
            <span class="dim"
              >${`${one.round ?? 0}${one.num_rounds ? `/${one.num_rounds}` : ""} ${duration(one.wall_s)}`}</span
            >
          </button>`,
      )}
      <nav>
        ${TABS.map(
          (tab) =>
            html`<button key=${tab} class=${tab === place.tab ? "on" : ""} onClick=${() => go({ tab })}>
              ${tab === "change" ? "before and after" : tab}
            </button>`,
        )} <button title="keyboard" onClick=${() => setHelp(!isHelp)}>?</button>
      </nav>
    </header>
    <main>
      <${Problem} error=${error ?? storedError} />${current.note &&
      html`<p class="dim note">${current.note}</p>`}
      ${stored?.left > 0 &&
      html`<p class="dim note">${`indexing: ${stored.left} files of samples left`}</p>`}
      ${tabs[place.tab]()}
    </main>
    ${isHelp &&
    html`<div class="card help">
      <table>
        ${KEYS.map(
          ([key, what]) =>
            html`<tr>
              <td><kbd>${key}</kbd></td>
              <td>${what}</td>
            </tr>`,
        )}
      </table>
    </div>`}`;
}

render(html`<${Page} />`, document.body);
