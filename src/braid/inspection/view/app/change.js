// Before and after on the same prompts, and how configs differ.
import { Problem, ask, html, number, signed, useAnswer, useRounds, useEffect, useState } from "./base.js";
import { Head, Turns } from "./rollouts.js";

const rounds = (stored, stage) =>
  (stored?.rounds ?? []).filter((one) => one.stage === stage).map((one) => one.round);

function Pair({ sides, stage, uid }) {
  const [pair, setPair] = useState(null),
    [error, setError] = useState(null);
  useEffect(() => {
    setPair(null);
    Promise.all(
      sides.map(async ({ run, round }) => {
        const { rows } = await ask("list", { run, stage, round, uid });
        return rows.length ? ask("trajectory", { run, stage, round, line: rows[0].line }) : null;
      }),
    ).then(setPair, (problem) => setError(problem.message));
  }, [JSON.stringify(sides), stage, uid]);
  if (!pair) return html`<${Problem} error=${error} />`;
  return html`${pair[0] &&
    html`<${Turns} run=${sides[0].run} whole=${{ ...pair[0], turns: [], env_rewards: null }} />`}
    <div class="columns turn">
      ${pair.map(
        (one, i) =>
          html`<div class="card">
            <div class="dim">${`round ${sides[i].round}`}</div>
            ${one &&
            html`<${Head} row=${one} /><${Turns} run=${sides[i].run} whole=${one} isShort=${true} />`}
          </div>`,
      )}
    </div>`;
}

export function Change({ runs, run, stored }) {
  const stages = ["eval", "round"].filter((stage) => rounds(stored, stage).length);
  const [choice, setChoice] = useState({}),
    [uid, setUid] = useState(null);
  const stage = choice.stage ?? stages[0];
  const otherRun = choice.otherRun ?? run;
  const [otherStored] = useRounds(otherRun, runs[otherRun].changed.samples);
  const here = rounds(stored, stage),
    there = rounds(otherStored, stage);
  const before = choice.before ?? here[0],
    after = choice.after ?? there[there.length - 1];
  const isReady = stage && before !== undefined && after !== undefined;
  const [answer, error] = useAnswer(
    "change",
    isReady ? { run, round: before, other_run: otherRun, other_round: after, stage } : null,
  );
  if (!stages.length) return html`<p class="dim">This run has stored no trajectories yet.</p>`;
  const wins = answer?.wins;
  const most = wins ? [...wins.most].sort((one, other) => Math.abs(other[1]) - Math.abs(one[1])) : [];
  const shown = uid ?? most[0]?.[0];
  const set =
    (name, kind = Number) =>
    (event) => {
      setUid(null);
      setChoice({ ...choice, [name]: kind(event.target.value) });
    };
  const pick = (list, value, name) =>
    html`<select aria-label=${name} value=${value} onChange=${set(name)}>
      ${list.map((one) => html`<option value=${one}>${`round ${one}`}</option>`)}
    </select>`;
  return html`<div class="row tools">
      <select aria-label="of" value=${stage} onChange=${set("stage", String)}>
        ${stages.map(
          (one) => html`<option value=${one}>${one === "eval" ? "evaluations" : "rounds"}</option>`,
        )}
      </select>
      ${pick(here, before, "before")}<span>against</span>
      ${runs.length > 1 &&
      html`<select
        aria-label="run"
        value=${otherRun}
        onChange=${(e) => {
          setUid(null);
          setChoice({ stage, before, otherRun: Number(e.target.value) });
        }}
      >
        ${runs.map((one, i) => html`<option value=${i}>${one.name}</option>`)}
      </select>`}
      ${pick(there, after, "after")}
    </div>
    <${Problem} error=${error} /> ${answer &&
    !wins &&
    html`<p class="dim">No prompt is in both: other data, or no valid answer.</p>`}
    ${wins &&
    html`<p class="row">
        <span>${`${wins.num_prompts} prompts: ${number(wins.first)} to ${number(wins.second)}`}</span
        ><b class=${wins.is_certain ? (wins.low > 0 ? "good" : "bad") : "warn"}
          >${signed(wins.difference)}</b
        >
        <span class="dim"
          >${`95 % interval ${signed(wins.low)} to ${signed(wins.high)}, paired bootstrap`}</span
        >
        <span>${`won ${wins.wins}, tied ${wins.ties}, lost ${wins.losses}`}</span>
        ${wins.num_unlike > 0 &&
        html`<span class="warn"
          >${`${wins.num_unlike} uids stand for other prompts and are left out`}</span
        >`}
      </p>
      <div class="sides">
        <div class="card pick wide">
          <table>
            <tr>
              <th>prompt</th>
              <th class="num">change</th>
            </tr>
            ${most.map(
              ([name, change]) =>
                html`<tr class=${`go ${name === shown ? "on" : ""}`} onClick=${() => setUid(name)}>
                  <td>${name}</td>
                  <td class=${`num ${change > 0 ? "good" : "bad"}`}>${signed(change)}</td>
                </tr>`,
            )}
          </table>
        </div>
        <div>
          ${shown
            ? html`<div class="card">
                <${Pair}
                  sides=${[
                    { run, round: before },
                    { run: otherRun, round: after },
                  ]}
                  stage=${stage}
                  uid=${shown}
                />
              </div>`
            : html`<p class="dim">Every prompt has the same score in both.</p>`}
        </div>
      </div>`}`;
}

export function Config({ runs }) {
  const [answer, error] = useAnswer("config", {});
  const [all, setAll] = useState(runs.length < 2),
    [search, setSearch] = useState("");
  if (!answer) return html`<${Problem} error=${error} />`;
  const keys = (all ? Object.keys(answer.rows) : answer.differing).filter((key) => key.includes(search));
  return html`<div class="row tools">
      <input
        type="search"
        id="find"
        placeholder="find a key  /"
        aria-label="find a key"
        value=${search}
        onInput=${(e) => setSearch(e.target.value)}
      />
      ${runs.length > 1 &&
      html`<label
        ><input
          type="checkbox"
          checked=${!all}
          onChange=${() => setAll(!all)}
        />${"only keys that differ"}</label
      >`}<span>${`${keys.length} keys`}</span>
    </div>
    <div class="card scroll">
      <table>
        <tr>
          <th>key</th>
          ${runs.map((run) => html`<th>${run.name}</th>`)}
        </tr>
        ${keys.map(
          (key) =>
            html`<tr key=${key}>
              <td>${key}</td>
              ${answer.rows[key].map(
                (value) => html`<td>${value ?? html`<span class="dim">–</span>`}</td>`,
              )}
            </tr>`,
        )}
      </table>
    </div>`;
}
