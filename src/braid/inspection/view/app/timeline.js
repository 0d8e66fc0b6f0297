// Where a round's time went: its stages, and the turns of its trajectories on the wall clock.
import { Problem, html, number, useAnswer } from "./base.js";

const STAGES = [
  "warm_up",
  "rollout",
  "compute_advantages",
  "update",
  "sync_weights",
  "evaluate",
  "export",
  "save",
];

const Bar = ({ label, parts, whole, title }) =>
  html`<div class="bar" title=${title}>
    <span class="num">${label}</span>
    <div class="lane">
      ${parts.map(
        ([kind, start, length]) =>
          html`<i
            class=${kind}
            style=${`left:${(100 * start) / whole}%;width:${(100 * length) / whole}%`}
          ></i>`,
      )}
    </div>
  </div>`;

export function Timeline({ run, place, go, stored, changed }) {
  const choices = (stored?.rounds ?? []).filter((one) => one.stage === "round");
  const round =
    place.stage === "round" && choices.some((one) => one.round === place.round)
      ? place.round
      : choices[choices.length - 1]?.round;
  const [metrics] = useAnswer("metrics", { run }, changed);
  const [times, error] = useAnswer("timeline", round === undefined ? null : { run, round });
  const at = metrics ? metrics.columns.round.indexOf(round) : -1;
  const stages =
    at < 0
      ? []
      : STAGES.map((name) => [name, metrics.columns[`time/${name}_s`]?.[at]]).filter(([, s]) => s);
  const whole =
    at < 0 ? 0 : Math.max(metrics.columns["time/round_s"]?.[at] ?? 0, ...stages.map(([, s]) => s));
  const turns = times?.trajectories.flatMap((one) => one.turns) ?? [];
  const start = Math.min(...turns.map(([from]) => from)),
    end = Math.max(...turns.map(([, to, env]) => to + env)),
    span = Math.max(end - start, 1e-9);
  if (!choices.length) return html`<p class="dim">No round of training has stored trajectories.</p>`;
  return html`<div class="row tools">
      <select
        aria-label="round"
        value=${round}
        onChange=${(e) => go({ stage: "round", round: Number(e.target.value), line: null })}
      >
        ${choices.map((one) => html`<option value=${one.round}>${`round ${one.round}`}</option>`)}
      </select>
      ${whole > 0 && html`<span>${`${number(whole)} s`}</span>`}
    </div>
    <div class="card">
      ${stages.map(
        ([name, s]) =>
          html`<${Bar}
            label=${`${name.replace("_", " ")} ${number(s)} s`}
            parts=${[["", 0, s]]}
            whole=${whole}
          />`,
      )}
      <p class="dim">
        ${"The length of each stage; stages may overlap, and their starts are not recorded."}
      </p>
    </div>
    <${Problem} error=${error} />
    ${turns.length > 0 &&
    html`<div class="card turn">
      <p class="dim">
        ${`Turns of ${times.trajectories.length < times.num ? `${times.trajectories.length} of ` : ""}${times.num} trajectories over ${number(span)} s: sampling in blue, the environment in grey, its tools in orange.`}
      </p>
      ${times.trajectories.map(
        (one) =>
          html`<${Bar}
            key=${one.line}
            label=${`${one.uid}.${one.sample}`}
            whole=${span}
            title=${one.turns
              .map(
                ([from, to, env], i) =>
                  `turn ${i + 1}: ${number(to - from)} s, environment ${number(env)} s`,
              )
              .join("\n")}
            parts=${one.turns
              .flatMap(([from, to, env, tool]) => [
                ["", from - start, to - from],
                ["env", to - start, env],
                ["tool", to - start, tool],
              ])
              .filter(([, , length]) => length > 0)}
          />`,
      )}
    </div>`}`;
}
