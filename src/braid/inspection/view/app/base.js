// What all parts of the page use: elements, questions to the server or to the report file, and forms of numbers.
// Texts of models only ever become text nodes: nothing here or elsewhere parses text as HTML.

export const { html, render, useState, useEffect, useMemo, useRef } = globalThis.htmPreact;

const embedded = document.getElementById("answers");
const answers = embedded && JSON.parse(embedded.textContent);
export const isReport = answers !== null;

/** Ask what `answers.py` answers: a question and its values. Values that are null or "" are left out. */
export async function ask(question, values = {}) {
  const kept = Object.entries(values).filter(
    ([, value]) => value !== null && value !== undefined && value !== "",
  );
  if (isReport) return answered(question, Object.fromEntries(kept));
  const reply = await fetch(`api/${question}?${new URLSearchParams(kept)}`);
  const body = await reply.json();
  if (!reply.ok) throw new Error(body.error);
  return body;
}

function answered(question, values) {
  const names =
    { list: ["run", "stage", "round"], trajectory: ["run", "stage", "round", "line"] }[question] ??
    Object.keys(values).sort();
  const answer =
    answers[
      [question, ...names.filter((name) => name in values).map((name) => `${name}=${values[name]}`)].join(
        " ",
      )
    ];
  if (answer === undefined)
    throw new Error("this report does not have it; braid view shows everything in the run folder");
  return question === "list" ? filtered(answer, values) : answer;
}

/** The filters and orders of `index.py`, for the lists in a report file. */
function filtered(answer, values) {
  const text = values.text?.toLowerCase();
  const above = (value, least) => least === undefined || (value !== null && value >= Number(least));
  const below = (value, most) => most === undefined || (value !== null && value <= Number(most));
  const rows = answer.rows.filter(
    (row) =>
      ["status", "source", "uid"].every((name) => !(name in values) || row[name] === values[name]) &&
      above(row.reward, values.min_reward) &&
      below(row.reward, values.max_reward) &&
      above(row.length, values.min_length) &&
      below(row.length, values.max_length) &&
      (!text || textOf(values, row).toLowerCase().includes(text)),
  );
  const by = {
    best: (row) => -(row.reward ?? -Infinity),
    worst: (row) => row.reward ?? Infinity,
    longest: (row) => -row.length,
    shortest: (row) => row.length,
  }[values.order];
  if (by) rows.sort((one, other) => (by(one) < by(other) ? -1 : by(one) > by(other) ? 1 : 0));
  return { num: rows.length, has_more: false, rows };
}

function textOf(values, row) {
  const whole =
    answers[`trajectory run=${values.run} stage=${row.stage} round=${row.round} line=${row.line}`];
  return whole
    ? [whole.prompt.text, ...whole.turns.flatMap((turn) => [turn.context_text, turn.output])].join("\n")
    : "";
}

export const fileAddress = (run, kind, name) =>
  isReport
    ? (answers[`file ${run} ${kind} ${name}`] ?? "")
    : `files/${run}/${kind}/${encodeURIComponent(name)}`;

/** The answer to a question, asked again when its values or `again` change: [answer, error]. */
export function useAnswer(question, values, again = "") {
  const [state, setState] = useState([null, null]);
  useEffect(() => {
    let isCurrent = true;
    if (values === null) return setState([null, null]);
    ask(question, values).then(
      (answer) => isCurrent && setState([answer, null]),
      (error) => isCurrent && setState([null, String(error.message)]),
    );
    return () => {
      isCurrent = false;
    };
  }, [question, JSON.stringify(values), again]);
  return state;
}

/** The rounds of a run; asked again while files are left that are not in the index yet. */
export function useRounds(run, changed) {
  const [times, setTimes] = useState(0);
  const [stored, error] = useAnswer("rounds", run === null ? null : { run }, `${changed} ${times}`);
  useEffect(() => {
    const timer = stored?.left > 0 && setTimeout(() => setTimes(times + 1), 100);
    return () => clearTimeout(timer);
  }, [stored]);
  return [stored, error];
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
}
export const signed = (value) => (value > 0 ? "+" : "") + number(value);
export const duration = (s) => {
  if (s === null || s === undefined) return "";
  const whole = Math.round(s),
    two = (n) => String(n).padStart(2, "0");
  return (
    (whole >= 3600
      ? `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}`
      : Math.floor(whole / 60)) + `:${two(whole % 60)}`
  );
};
export const unit = (value, name) =>
  name === "bytes" && value
    ? `${number(value / 2 ** 20)} MiB`
    : `${number(value)}${name ? ` ${name}` : ""}`;

export const COLORS = [
  "#2f62c9",
  "#d9822b",
  "#2c9c6a",
  "#a855c9",
  "#c93f5b",
  "#1f9bb3",
  "#8a8d3a",
  "#7a6a5d",
];
export const colorOf = (run) => COLORS[run % COLORS.length];
export const statusClass = (status) =>
  ({ finished: "good", running: "", truncated: "warn", interrupted: "warn", stopped: "warn" })[status] ??
  "bad";
export const Problem = ({ error }) => error && html`<p class="bad">${error}</p>`;
