// The trajectories of a round: a filtered list, one of them whole, or its group side by side.
import {
  Problem,
  ask,
  fileAddress,
  html,
  isReport,
  number,
  signed,
  statusClass,
  useAnswer,
  useEffect,
  useMemo,
  useState,
} from "./base.js";
import { MODES, Output, modesOf, rangeOf } from "./tokens.js";

const plainText = (content) =>
  typeof content === "string" ? content : (content ?? []).map((part) => part.text ?? "").join("");
const imageNames = (content) =>
  typeof content === "string"
    ? []
    : (content ?? []).filter((part) => part.type === "image").map((part) => part.image);

const Images = ({ run, names }) =>
  names.map(
    (name) =>
      html`<img
        class="given"
        loading="lazy"
        alt="an image of the prompt"
        src=${fileAddress(run, "images", name.split("/").pop())}
      />`,
  );

function Other({ run, who, text, images = [] }) {
  return html`<div class="turn">
    <div class="who">${who}</div>
    <div class="text other">${text}</div>
    <${Images} run=${run} names=${images} />
  </div>`;
}

export function Head({ row }) {
  const parts = Object.entries(row.reward_parts ?? {});
  return html`<div class="row">
    <b>${row.uid}.${row.sample}</b> <span>reward</span><b>${number(row.reward)}</b>
    ${parts.length > 1 &&
    html`<span class="dim">${parts.map(([name, value]) => `${name} ${number(value)}`).join(", ")}</span>`}
    <span class=${statusClass(row.status)}>${row.status}${row.reason ? ` (${row.reason})` : ""}</span>
    <span class="dim">${row.source}</span>
  </div>`;
}

export function Turns({ run, whole, mode, onToken, isShort }) {
  const range = useMemo(() => rangeOf(whole.turns, mode), [whole, mode]);
  const messages = whole.prompt.messages ?? [];
  const about = (turn) =>
    [
      turn.agent && turn.agent !== "policy" ? `policy as ${turn.agent}` : "policy",
      `${turn.ids.length} tokens`,
      turn.stop_reason,
      turn.reward && `reward ${number(turn.reward)}`,
      turn.end_s > turn.start_s && `${number(turn.end_s - turn.start_s)} s`,
      turn.env_s >= 0.001 && `environment ${number(turn.env_s)} s`,
    ]
      .filter(Boolean)
      .join(", ");
  return html` ${!isShort &&
  (messages.length
    ? messages.map(
        (one) =>
          html`<${Other}
            run=${run}
            who=${one.role}
            text=${plainText(one.content)}
            images=${imageNames(one.content)}
          />`,
      )
    : whole.prompt.text &&
      html`<${Other}
        run=${run}
        who="prompt"
        text=${whole.prompt.text}
        images=${(whole.prompt.images ?? []).map((one) => one.image)}
      />`)}
  ${whole.turns.map(
    (turn, i) =>
      html` ${i > 0 &&
        turn.context_text &&
        html`<${Other}
          run=${run}
          who="environment"
          text=${turn.context_text}
          images=${(turn.images ?? []).map((one) => one.image)}
        />`}
        <div class="turn">
          <div class="who">${about(turn)}</div>
          <${Output} turn=${turn} mode=${mode} range=${range} onToken=${onToken} />
        </div>`,
  )}
  ${whole.env_rewards &&
  html`<p class="dim">
    ${`${whole.env_rewards.length} env steps; rewards ${whole.env_rewards.map((value) => number(value)).join(" ")}`}
  </p>`}`;
}

const keyOf = (run, row) => ({ run, stage: row.stage, round: row.round, line: row.line });

function Group({ run, row, mode }) {
  const [members, setMembers] = useState(null),
    [error, setError] = useState(null);
  useEffect(() => {
    setMembers(null);
    ask("list", { run, stage: row.stage, round: row.round, uid: row.uid, limit: 500 })
      .then(({ rows }) =>
        Promise.all(
          rows
            .filter((one) => one.group_number === row.group_number)
            .map((one) => ask("trajectory", keyOf(run, one))),
        ),
      )
      .then(setMembers, (problem) => setError(problem.message));
  }, [run, row.stage, row.round, row.line]);
  if (!members) return html`<${Problem} error=${error} />`;
  return html`<${Turns} run=${run} whole=${{ ...members[0], turns: [], env_rewards: null }} />
    <div class="columns turn">
      ${members.map(
        (one) =>
          html`<div class="card">
            <${Head} row=${one} /><${Turns} run=${run} whole=${one} mode=${mode} isShort=${true} />
          </div>`,
      )}
    </div>`;
}

function One({ run, row, mode, setMode, isGroup, setGroup }) {
  const [whole, error] = useAnswer("trajectory", keyOf(run, row));
  const [token, setToken] = useState("");
  if (!whole) return html`<div class="card"><${Problem} error=${error} /></div>`;
  const modes = modesOf(whole.turns),
    shown = modes.includes(mode) ? mode : modes[0];
  const range = shown && rangeOf(whole.turns, shown);
  return html`<div class="card">
    <div class="stick">
      <${Head} row=${whole} />
      <div class="row dim">
        <span>${`${row.stage === "eval" ? "evaluation after " : ""}round ${row.round}`}</span>
        ${row.advantage !== null && html`<span>${`mean advantage ${signed(row.advantage)}`}</span>`}
        ${Object.entries(whole.metrics ?? {})
          .filter(([name]) => !name.endsWith("_s"))
          .map(([name, value]) => html`<span>${`${name} ${number(value)}`}</span>`)}
        ${modes.length > 0 &&
        html`<label
          >colour<select value=${shown} onChange=${(e) => setMode(e.target.value)}>
            ${modes.map((one) => html`<option value=${one}>${MODES[one][0]}</option>`)}
          </select></label
        >`}
        ${range && html`<span>${`${number(range[0])} to ${number(range[1])}`}</span>`}
        <button class=${isGroup ? "on" : ""} onClick=${() => setGroup(!isGroup)}>group</button>
      </div>
      <div class="at-token">
        ${token ||
        (modes.length
          ? "point at a token for its numbers"
          : "this file has no texts of single tokens, so none can be coloured")}
      </div>
    </div>
    ${isGroup
      ? html`<${Group} run=${run} row=${row} mode=${shown} />`
      : html`<${Turns} run=${run} whole=${whole} mode=${shown} onToken=${setToken} />`}
  </div>`;
}

const ORDERS = {
  file: "as sampled",
  best: "best first",
  worst: "worst first",
  longest: "longest first",
  shortest: "shortest first",
};
const PAGE = 200;

export function Rollouts({ run, place, go, stored, changed, keys }) {
  const [filter, setFilter] = useState({ order: "file" });
  const [limit, setLimit] = useState(PAGE),
    [mode, setMode] = useState("advantage"),
    [isGroup, setGroup] = useState(false);
  const choices = stored?.rounds ?? [];
  const last = choices.filter((one) => one.stage === "round").pop() ?? choices[choices.length - 1];
  const stage = place.stage ?? last?.stage,
    round = place.round ?? last?.round;
  const scope = filter.all ? {} : { stage, round };
  const { all, ...rest } = filter;
  const [list, error] = useAnswer(
    "list",
    stage ? { run, ...scope, ...rest, limit } : null,
    filter.all ? changed : "",
  );
  const rows = list?.rows ?? [];
  const at = Math.max(
    0,
    rows.findIndex((row) => row.line === place.line && row.round === round && row.stage === stage),
  );
  const row = rows[at];
  const open = (one) => go({ stage: one.stage, round: one.round, line: one.line });
  const step = (num) => {
    const next = rows[at + num];
    if (next) {
      open(next);
      document.querySelector(`[data-at="${at + num}"]`)?.scrollIntoView({ block: "nearest" });
    }
  };
  const turnRound = (num) => {
    const same = choices.filter((one) => one.stage === stage),
      next = same[same.findIndex((one) => one.round === round) + num];
    if (next) go({ stage, round: next.round, line: null });
  };
  keys.current = {
    j: () => step(1),
    k: () => step(-1),
    l: () => turnRound(1),
    h: () => turnRound(-1),
    g: () => setGroup(!isGroup),
    c: () => {
      const names = Object.keys(MODES);
      setMode(names[(names.indexOf(mode) + 1) % names.length]);
    },
  };
  const set = (name) => (event) => {
    setLimit(PAGE);
    setFilter({
      ...filter,
      [name]: event.target.type === "checkbox" ? event.target.checked : event.target.value,
    });
  };
  const input = (name, hint) =>
    html`<input
      placeholder=${hint}
      aria-label=${hint}
      value=${filter[name] ?? ""}
      onChange=${set(name)}
    />`;
  if (stored && !choices.length)
    return html`<p class="dim">
      This run has stored no trajectories yet: report.samples_every_rounds chooses the rounds,
      eval.every_rounds the evaluations.
    </p>`;
  return html`<div class="sides">
    <div class="card pick">
      <div class="filters">
        <select
          class="wide"
          aria-label="round"
          value=${`${stage} ${round}`}
          onChange=${(e) => {
            const [s, r] = e.target.value.split(" ");
            go({ stage: s, round: Number(r), line: null });
          }}
        >
          ${choices.map(
            (one) =>
              html`<option value=${`${one.stage} ${one.round}`}>
                ${`${one.stage === "eval" ? "evaluation" : "round"} ${one.round}: reward ${number(one.reward)}, ${one.num}`}
              </option>`,
          )}
        </select>
        <input
          class="wide"
          id="find"
          type="search"
          placeholder="text in prompt, reply or answer  /"
          aria-label="text"
          value=${filter.text ?? ""}
          onChange=${set("text")}
        />
        ${input("min_reward", "reward ≥")}${input("max_reward", "reward ≤")}
        ${input("min_length", "tokens ≥")}${input("max_length", "tokens ≤")}
        <select aria-label="status" value=${filter.status ?? ""} onChange=${set("status")}>
          <option value="">any status</option>
          ${["finished", "truncated", "invalid"].map((one) => html`<option>${one}</option>`)}
        </select>
        <select aria-label="source" value=${filter.source ?? ""} onChange=${set("source")}>
          <option value="">any source</option>
          ${(stored?.sources ?? []).map((one) => html`<option>${one}</option>`)}
        </select>
        <select aria-label="order" value=${filter.order} onChange=${set("order")}>
          ${Object.entries(ORDERS).map(([one, text]) => html`<option value=${one}>${text}</option>`)}
        </select>
        ${input("uid", "uid")}
        ${!isReport &&
        html`<label class="wide dim"
          ><input type="checkbox" checked=${Boolean(filter.all)} onChange=${set("all")} />in all
          rounds</label
        >`}
      </div>
      <${Problem} error=${error} />
      ${list &&
      html`<div class="dim">${`${list.num}${list.has_more && filter.text ? "+" : ""} trajectories`}</div>`}
      ${rows.map(
        (one, i) =>
          html`<div
            key=${`${one.stage}${one.round}.${one.line}`}
            data-at=${i}
            onClick=${() => open(one)}
            class=${`item ${i === at ? "on" : ""} ${i && rows[i - 1].group_number !== one.group_number ? "new" : ""}`}
          >
            <div class="row">
              <b>${number(one.reward)}</b><span class="uid">${one.uid}.${one.sample}</span>${filter.all &&
              html`<span class="dim">${`${one.stage} ${one.round}`}</span>`}
              ${one.status !== "finished" &&
              html`<span class=${statusClass(one.status)}>${one.status}</span>`}<span class="dim"
                >${one.length}</span
              >
            </div>
            <div class="what">${one.answer || "(no text)"}</div>
          </div>`,
      )}
      ${list?.has_more &&
      html`<button onClick=${() => setLimit(limit + PAGE)} disabled=${limit >= 1000}>
        ${limit >= 1000 ? "narrow the filters to see the others" : "more"}
      </button>`}
    </div>
    <div>
      ${row &&
      html`<${One}
        key=${run}
        run=${run}
        row=${row}
        mode=${mode}
        setMode=${setMode}
        isGroup=${isGroup}
        setGroup=${setGroup}
      />`}
    </div>
  </div>`;
}
