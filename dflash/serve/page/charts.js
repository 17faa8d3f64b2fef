// The pictures beside the answer, drawn anew from the passes. Colours come from the style sheet.

const NS = "http://www.w3.org/2000/svg";
const STEP = 9; // pixels of a pass
const HIGH = 64;

function svg(width, height, label) {
  const picture = document.createElementNS(NS, "svg");
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  picture.setAttribute("width", width);
  picture.setAttribute("height", height);
  picture.setAttribute("aria-hidden", "true");
  if (label) picture.setAttribute("class", label);
  return picture;
}

function shape(parent, name, attributes, text) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function show(place, picture, words) {
  const atEnd = place.scrollLeft + place.clientWidth >= place.scrollWidth - 4;
  place.replaceChildren(...(picture ? [picture] : []));
  place.classList.toggle("empty", !picture);
  if (atEnd) place.scrollLeft = place.scrollWidth;
  place.setAttribute("aria-label", words);
}

export const percent = (share) => `${Math.round(100 * share)} %`;

// One column a pass: what it committed, inside the block it checked.
export function strip(place, passes) {
  const rounds = passes.rounds;
  if (!rounds.length) return show(place, null, "No pass yet");
  const top = Math.max(2, ...rounds.map((pass) => pass.block));
  const unit = HIGH / top;
  const picture = svg(rounds.length * STEP, HIGH + 2);
  rounds.forEach((pass, i) => {
    const x = i * STEP + 1;
    const column = (from, count, kind) =>
      shape(picture, "rect", {
        class: kind,
        x,
        y: HIGH - (from + count) * unit + 1,
        width: STEP - 2,
        height: Math.max(1, count * unit - 1),
        rx: 1.5,
      });
    if (pass.drafted) column(0, pass.block, "outline");
    if (pass.accepted) column(0, pass.accepted, "draft");
    column(pass.accepted, pass.committed - pass.accepted, pass.drafted ? "target" : "fallback");
  });
  const mean = passes.meanCommitted?.toFixed(2);
  show(place, picture, `Passes: ${rounds.length}. Tokens committed by each, on average: ${mean}`);
}

// The block size of each pass as a step line.
export function blockSizes(place, passes) {
  const rounds = passes.rounds;
  if (!rounds.length) return show(place, null, "No pass yet");
  const top = Math.max(2, ...rounds.map((pass) => pass.block));
  const high = 44;
  const y = (size) => high - 4 - ((size - 1) / (top - 1)) * (high - 12);
  const picture = svg(rounds.length * STEP, high);
  shape(picture, "line", { class: "grid", x1: 0, x2: rounds.length * STEP, y1: y(1), y2: y(1) });
  shape(picture, "line", { class: "grid", x1: 0, x2: rounds.length * STEP, y1: y(top), y2: y(top) });
  const path = rounds
    .map((pass, i) => `${i ? "L" : "M"}${i * STEP} ${y(pass.block)}H${(i + 1) * STEP}`)
    .join("");
  shape(picture, "path", { class: "step", d: path });
  const sizes = rounds.map((pass) => pass.block);
  const words = `Block sizes from ${Math.min(...sizes)} to ${Math.max(...sizes)}, the last ${sizes.at(-1)}`;
  show(place, picture, words);
}

// A bar for each drafted position: the share of its passes that kept it.
export function positions(place, table, passes) {
  const rows = passes.positions;
  const wide = Math.min(59, Math.floor(320 / Math.max(1, rows.length)) - 5);
  const high = 54;
  const picture = svg(Math.max(1, rows.length * (wide + 5)), high + 30);
  rows.forEach((row, i) => {
    const share = row.kept / row.judged;
    const x = i * (wide + 5);
    const tall = Math.max(1, share * high);
    shape(picture, "rect", { class: "outline", x, y: 14, width: wide, height: high, rx: 3 });
    shape(picture, "rect", { class: "draft", x, y: 14 + high - tall, width: wide, height: tall, rx: 3 });
    const middle = { x: x + wide / 2, "text-anchor": "middle" };
    shape(picture, "text", { ...middle, y: 10 }, Math.round(100 * share));
    shape(picture, "text", { ...middle, y: high + 27 }, i + 1);
  });
  const kept = rows.map((row) => percent(row.kept / row.judged)).join(", ");
  show(place, rows.length ? picture : null, rows.length ? `Kept of draft 1, 2, ...: ${kept}` : "No draft yet");
  table.replaceChildren(
    ...rows.map((row, i) => {
      const line = document.createElement("tr");
      [i + 1, row.judged, row.kept, percent(row.kept / row.judged)].forEach((value, column) => {
        const cell = document.createElement(column ? "td" : "th");
        if (!column) cell.scope = "row";
        cell.textContent = value;
        line.append(cell);
      });
      return line;
    }),
  );
}

// How the tokens divide among draft, target and fallback.
export function shares(place, counts) {
  const total = counts.draft + counts.target + counts.fallback;
  const parts = Object.entries(counts).filter(([, count]) => count);
  place.replaceChildren(
    ...parts.map(([kind, count]) => {
      const part = document.createElement("span");
      part.className = kind;
      part.style.flexGrow = count;
      return part;
    }),
  );
  const words = parts.map(([kind, count]) => `${kind} ${percent(count / total)}`).join(", ");
  place.setAttribute("aria-label", total ? words : "No answer yet");
}

// One bar a way of decoding; `rows` are {name, kind, rate, note}.
export function speeds(place, rows) {
  const top = Math.max(...rows.map((row) => row.rate ?? 0), 1);
  place.replaceChildren(
    ...rows.map((row) => {
      const line = document.createElement("div");
      line.className = "speed-row";
      const name = document.createElement("span");
      name.textContent = row.name;
      const bar = document.createElement("span");
      bar.className = "bar";
      const fill = document.createElement("span");
      fill.className = row.kind;
      fill.style.width = `${(100 * (row.rate ?? 0)) / top}%`;
      bar.append(fill);
      const value = document.createElement("b");
      value.textContent = row.rate === null ? "–" : row.rate.toFixed(1);
      line.append(name, bar, value);
      return line;
    }),
  );
}
