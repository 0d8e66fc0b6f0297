// Curves: metrics by round, several runs on one chart.
import { ask, colorOf, html, number, unit, useEffect, useRef, useState } from "./base.js";

/** Exponential mean of the values that are there, without bias towards 0 at the start. */
function smoothed(values, factor) {
  let mean = 0,
    weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = factor * mean + (1 - factor) * value;
    weight = factor * weight + (1 - factor);
    return mean / weight;
  });
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function Chart({ name, about, lines, smoothing, isLog, scheme, onRound }) {
  const box = useRef(),
    at = useRef();
  useEffect(() => {
    const isLogarithmic = isLog && lines.some((line) => line.values.some((value) => value > 0));
    const clean = (values) =>
      values.map((value) => (typeof value !== "number" || (isLogarithmic && value <= 0) ? null : value));
    const tables = lines.map((line) => {
      const values = clean(line.values);
      return smoothing ? [line.rounds, values, smoothed(values, smoothing)] : [line.rounds, values];
    });
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const series = lines.flatMap((line) => {
      const isSparse = line.values.filter((value) => typeof value === "number").length < 40;
      const plain = {
        label: line.name,
        stroke: line.color,
        width: 1.6,
        spanGaps: true,
        points: { show: isSparse, size: 4 },
      };
      return smoothing
        ? [
            { ...plain, stroke: `${line.color}44`, width: 1, points: { show: false } },
            { ...plain, points: { show: false } },
          ]
        : [plain];
    });
    const axis = {
      stroke: style("--dim"),
      grid: { stroke: style("--line"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
    };
    const say = (plot) => {
      const i = plot.cursor.idx;
      if (i === null || i === undefined) return at.current && (at.current.textContent = "");
      const shown = lines
        .map((line, k) => [line, plot.data[smoothing ? 2 * k + 2 : k + 1][i]])
        .filter(([, value]) => value !== null && value !== undefined);
      at.current.textContent =
        `round ${plot.data[0][i]}: ` +
        shown
          .map(([line, value]) => (lines.length > 1 ? `${line.name} ` : "") + unit(value, about.unit))
          .join(", ");
    };
    const plot = new uPlot(
      {
        width: Math.max(200, box.current.clientWidth),
        height: 170,
        legend: { show: false },
        cursor: { sync: { key: "rounds" }, points: { size: 6 } },
        scales: { x: { time: false }, y: isLogarithmic ? { distr: 3 } : {} },
        axes: [
          {
            ...axis,
            size: 26,
            incrs: [1, 2, 5]
              .flatMap((one) => [1, 10, 100, 1e3, 1e4, 1e5].map((ten) => one * ten))
              .sort((a, b) => a - b),
          },
          {
            ...axis,
            size: 58,
            values: (_, ticks) =>
              ticks.map((tick) =>
                tick === null
                  ? ""
                  : about.unit === "bytes"
                    ? number(tick / 2 ** 20) + "M"
                    : number(tick, 4),
              ),
          },
        ],
        series: [{}, ...series],
        hooks: { setCursor: [say] },
      },
      data,
      box.current,
    );
    plot.over.addEventListener("click", () => {
      if (plot.cursor.idx !== null && !plot.select.width) onRound(plot.data[0][plot.cursor.idx]);
    });
    const watcher = new ResizeObserver(() => plot.setSize({ width: box.current.clientWidth, height: 170 }));
    watcher.observe(box.current);
    return () => {
      watcher.disconnect();
      plot.destroy();
    };
  }, [JSON.stringify(lines), smoothing, isLog, scheme]);
  return html`<div class="card chart">
    <h3>${name}</h3>
    <p title=${about.meaning}>${about.meaning}</p>
    <div ref=${box}></div>
    <div class="at dim" ref=${at}></div>
  </div>`;
}

/** The metrics of all runs, asked again when a run's metrics.jsonl changes. */
function useMetrics(runs) {
  const [tables, setTables] = useState({}),
    versions = useRef({});
  useEffect(() => {
    runs.forEach((run, i) => {
      if (versions.current[i] === run.changed.metrics) return;
      versions.current[i] = run.changed.metrics;
      ask("metrics", { run: i }).then(
        (table) => setTables((old) => ({ ...old, [i]: table })),
        () => {
          versions.current[i] = null;
        },
      );
    });
  }, [runs]);
  return tables;
}

export function Curves({ runs, hidden, onRound, scheme }) {
  const tables = useMetrics(runs);
  const [chosen, setChosen] = useState(null),
    [search, setSearch] = useState("");
  const [smoothing, setSmoothing] = useState(0),
    [isLog, setLog] = useState(false);
  const shown = Object.keys(tables)
    .map(Number)
    .filter((i) => !hidden.has(i));
  const about = Object.assign({}, ...shown.map((i) => tables[i].about));
  const first = [...new Set(shown.flatMap((i) => tables[i].first))];
  const names = chosen ?? first;
  const toggle = (name) =>
    setChosen(names.includes(name) ? names.filter((one) => one !== name) : [...names, name]);
  const sections = {};
  for (const name of Object.keys(about).sort()) {
    if (name.includes(search)) (sections[name.split("/")[0]] ??= []).push(name);
  }
  const lines = (name) =>
    shown
      .filter((i) => tables[i].columns[name])
      .map((i) => ({
        name: runs[i].name,
        color: colorOf(i),
        rounds: tables[i].columns.round,
        values: tables[i].columns[name],
      }));
  return html`<div class="sides">
    <div class="card pick metrics">
      <input
        type="search"
        placeholder="find a metric  /"
        value=${search}
        onInput=${(e) => setSearch(e.target.value)}
        id="find"
        aria-label="find a metric"
      />
      ${Object.entries(sections).map(
        ([section, list]) =>
          html`<details key=${section} open=${Boolean(search) || list.some((name) => names.includes(name))}>
            <summary>${section}</summary>
            ${list.map(
              (name) =>
                html`<label key=${name} title=${about[name].meaning}
                  ><input
                    type="checkbox"
                    checked=${names.includes(name)}
                    onChange=${() => toggle(name)}
                  />${name.slice(section.length + 1) || name}</label
                >`,
            )}
          </details>`,
      )}
    </div>
    <div>
      <div class="row tools">
        <label class="row"
          >smoothing<input
            type="range"
            min="0"
            max="0.98"
            step="0.02"
            value=${smoothing}
            onInput=${(e) => setSmoothing(Number(e.target.value))}
          />
          <span>${smoothing.toFixed(2)}</span></label
        >
        <label
          ><input type="checkbox" checked=${isLog} onChange=${(e) => setLog(e.target.checked)} />log
          scale</label
        >
        ${chosen && html`<button onClick=${() => setChosen(null)}>usual metrics</button>`}
        <span>drag to zoom, double click to zoom out, click to read the rollouts of a round</span>
      </div>
      <div class="charts">
        ${names
          .filter((name) => about[name])
          .map(
            (name) =>
              html`<${Chart}
                key=${name}
                name=${name}
                about=${about[name]}
                lines=${lines(name)}
                smoothing=${smoothing}
                isLog=${isLog}
                scheme=${scheme}
                onRound=${onRound}
              />`,
          )}
      </div>
      ${!names.length && html`<p class="dim">No round has ended yet.</p>`}
    </div>
  </div>`;
}
