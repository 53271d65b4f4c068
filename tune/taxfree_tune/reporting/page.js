const data = JSON.parse(document.getElementById("data").textContent);
const filters = [...document.querySelectorAll("[data-filter]")];
const hover = document.getElementById("hover");
const wanted = {};  // key of rows -> value
const drawn = [];   // one per figure

function passes(row, own) {
  return Object.entries({ ...wanted, ...own }).every(([key, value]) =>
    !value || row[key] === undefined || String(row[key]) === value);
}

/* A figure's own choice of rows; of choices that the filters leave nothing of, none can be chosen. */
function chosen(figure) {
  const own = {};
  for (const select of figure.element.querySelectorAll('[data-kind="rows"]')) {
    const left = new Set(figure.rows.filter((row) => passes(row, {})).map((row) => String(row[select.dataset.name])));
    for (const option of select.options) option.hidden = option.disabled = !left.has(option.value);
    if (select.selectedOptions[0]?.disabled) {
      const next = [...select.options].find((option) => !option.disabled);
      if (next) select.value = next.value;
    }
    own[select.dataset.name] = select.value;
  }
  return own;
}

/* Rows that pass, in the drawing's own copies; the table, and what is said of both, follow. */
function passing(figure) {
  const own = chosen(figure);
  const rows = figure.rows.filter((row) => passes(row, own));
  const element = figure.element;
  for (const part of [".drawing", "details"]) element.querySelector(part).hidden = !rows.length;
  element.querySelector(".none").hidden = rows.length > 0;
  element.querySelector(".said").textContent = "";
  let count = 0;
  for (const row of element.querySelectorAll("tbody tr")) {
    row.hidden = !passes(row.dataset, own);
    count += !row.hidden;
  }
  element.querySelector(".count").textContent = count;
  return rows.map((row) => ({ ...row }));
}

/* Strips cannot fit themselves to their container as single drawings do. */
const named = (list, name) => list.find((each) => each.name === name);
const room = ({ target, widths: [least, most] }) => Math.max(least, Math.min(most, target.clientWidth - 60));

async function draw(figure) {
  const { target, drawing } = figure;
  named(drawing.data, "rows").values = passing(figure);
  const width = named(drawing.signals ?? [], "child_width");
  figure.strips = Boolean(width);
  if (width) width.value = room(figure);
  const { view } = await vegaEmbed(target, drawing, {
    mode: "vega", renderer: "svg", actions: false, tooltip: explain,
  });
  figure.view = view;
  target.addEventListener("keydown", walk);
  figure.element.addEventListener("change", () => show(figure));
}

function show(figure) {
  const { view } = figure, rows = passing(figure);
  if (!rows.length) return;
  view.data("rows", rows);
  for (const select of figure.element.querySelectorAll('[data-kind="parameter"]'))
    view.signal(select.dataset.name, select.value);
  return view.runAsync();
}

async function showAll() {
  for (const select of filters) wanted[select.dataset.filter] = select.value;
  await Promise.all(drawn.map(show));
  count();
}

function count() {
  const compared = drawn.filter((figure) => figure.element.id.startsWith("map-"));
  const sum = compared.reduce((sum, figure) => sum + figure.rows.filter((row) => passes(row, {})).length, 0);
  document.getElementById("shown").textContent = `${sum} problems`;
}

// -- hovers, and the same by keyboard --

function explain(_, event, item, value) {
  hover.hidden = value === null || value === undefined || value === "";
  if (hover.hidden) return;
  const list = document.createElement("dl");
  for (const [name, text] of Object.entries(value)) {
    if (text === "null" || text === "undefined" || text === "") continue;
    list.append(Object.assign(document.createElement("dt"), { textContent: name }));
    list.append(Object.assign(document.createElement("dd"), { textContent: text }));
  }
  hover.replaceChildren(list);
  const { width, height } = hover.getBoundingClientRect();
  hover.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4))}px`;
  hover.style.top = `${Math.max(4, event.clientY + 14 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 14)}px`;
}

const directions = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function walk(event) {
  const direction = directions[event.key];
  if (!direction && event.key !== "Escape") return;
  const drawing = event.currentTarget;
  const current = drawing.querySelector(".at");
  current?.classList.remove("at");
  const said = drawing.parentElement.querySelector(".said");
  said.textContent = "";
  if (!direction) return;
  event.preventDefault();
  const marks = [...drawing.querySelectorAll('.role-mark > [aria-label]')].map((mark) => {
    const box = mark.getBoundingClientRect();
    return { mark, x: box.x + box.width / 2, y: box.y + box.height / 2 };
  });
  const from = marks.find(({ mark }) => mark === current);
  let best = from ?? marks[0], least = Infinity;
  for (const each of from ? marks : []) {
    const along = (each.x - from.x) * direction[0] + (each.y - from.y) * direction[1];
    const aside = Math.abs((each.x - from.x) * direction[1]) + Math.abs((each.y - from.y) * direction[0]);
    if (along > 0.5 && along + 3 * aside < least) [best, least] = [each, along + 3 * aside];
  }
  if (!best) return;
  best.mark.classList.add("at");
  best.mark.scrollIntoView({ block: "nearest", inline: "nearest" });
  said.textContent = best.mark.getAttribute("aria-label");
}

for (const element of document.querySelectorAll("[data-figure]")) {
  const known = data[element.dataset.figure];
  const target = element.querySelector(".drawing");
  drawn.push({ ...known, element, target });
}
for (const select of filters) select.addEventListener("change", showAll);
for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());

const relative = new Intl.RelativeTimeFormat("en", { numeric: "auto" });
for (const time of document.querySelectorAll("time.age"))
  time.textContent = relative.format(Math.round((new Date(time.dateTime) - Date.now()) / 864e5), "day");

addEventListener("resize", () => {
  for (const figure of drawn)
    if (figure.strips) figure.view.signal("child_width", room(figure)).runAsync();
});

for (const figure of drawn) await draw(figure);
count();
document.documentElement.dataset.ready = "";
