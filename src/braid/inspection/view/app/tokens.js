// A turn's output, with its tokens coloured by a number.
import { html, number, signed } from "./base.js";

const minus = (one, other) =>
  one && other
    ? one.map((value, i) => (value === null || other[i] === null ? null : value - other[i]))
    : null;

/** What tokens can be coloured by: label, and the values of a turn's `numbers` (null if it has none). */
export const MODES = {
  advantage: ["advantage", (n) => n.advantages],
  sampler: ["sampler's log-prob", (n) => n.logprob],
  mismatch: ["trainer − sampler (log ratio)", (n) => minus(n.old_logprobs, n.logprob)],
  reference: ["trainer − reference", (n) => minus(n.old_logprobs, n.ref_logprobs)],
  entropy: ["entropy", (n) => n.entropy],
  value: ["critic's value", (n) => n.values],
  return: ["return", (n) => n.returns],
  reward: ["reward", (n) => n.rewards],
  version: ["weights' version", (n) => n.version],
};

export const modesOf = (turns) =>
  Object.keys(MODES).filter((mode) => turns.some((turn) => turn.tokens && MODES[mode][1](turn.numbers)));

/** [lowest, highest] value of a mode over all turns. */
export function rangeOf(turns, mode) {
  let low = Infinity,
    high = -Infinity;
  for (const turn of turns) {
    for (const value of MODES[mode]?.[1](turn.numbers) ?? []) {
      if (value !== null) {
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
  }
  return low > high ? null : [low, high];
}

/** Blue above 0 and orange below, by the largest absolute value; versions by their distance from the oldest. */
function shade(value, [low, high], mode) {
  if (value === null || value === undefined) return "";
  const part =
    mode === "version"
      ? high > low
        ? (value - low) / (high - low)
        : 0
      : value / Math.max(Math.abs(low), Math.abs(high), 1e-12);
  const percent = Math.round(Math.min(1, Math.abs(part)) * 45);
  return percent
    ? `background:color-mix(in srgb,var(--${part < 0 ? "minus" : "plus"}) ${percent}%,transparent)`
    : "";
}

function describe(turn, i) {
  const n = turn.numbers,
    ratio = n.old_logprobs && n.logprob && Math.exp(n.old_logprobs[i] - n.logprob[i]);
  const parts = [
    `${JSON.stringify(turn.tokens[i])}  id ${turn.ids[i]}`,
    n.logprob && `p ${number(Math.exp(n.logprob[i]))}, log-prob ${number(n.logprob[i])}`,
    n.old_logprobs && `trainer ${number(n.old_logprobs[i])}, ratio ${number(ratio, 5)}`,
    n.ref_logprobs && `reference ${number(n.ref_logprobs[i])}`,
    n.advantages && `advantage ${signed(n.advantages[i])}`,
    n.rewards && n.rewards[i] ? `reward ${number(n.rewards[i])}` : null,
    n.values && `value ${number(n.values[i])}`,
    n.returns && `return ${number(n.returns[i])}`,
    n.entropy && `entropy ${number(n.entropy[i])}`,
    n.version && `version ${n.version[i]}`,
  ];
  return parts.filter(Boolean).join("   ");
}

export function Output({ turn, mode, range, onToken }) {
  const values = range && MODES[mode]?.[1](turn.numbers);
  if (!turn.tokens || !values) return html`<div class="text policy">${turn.output}</div>`;
  const over = (event) => {
    const i = event.target.dataset?.i;
    onToken?.(i === undefined ? "" : describe(turn, Number(i)));
  };
  return html`<div class="text policy" onMouseOver=${over} onMouseLeave=${() => onToken?.("")}>
    ${turn.tokens.map(
      (text, i) => html`<span data-i=${i} style=${shade(values[i], range, mode)}>${text}</span>`,
    )}
  </div>`;
}
