"use strict";
// Sorting, switching rows off, and values under the pointer. The page is complete without this script.
(() => {
  const { figures, ranked } = JSON.parse(document.getElementById("data").textContent);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const hiddenRows = new Set();
  document.documentElement.classList.add("js");

  // -- sorting: numbers by value, words by their order, empty cells last --------------------------------------------
  const valueOf = (row, column) => row.children[column].dataset.value ?? "";
  const compare = (one, other) => {
    const numeric = one !== "" && other !== "" && !Number.isNaN(+one) && !Number.isNaN(+other);
    return numeric ? one - other : one.localeCompare(other, undefined, { numeric: true });
  };
  const sort = (heading) => {
    const table = heading.closest("table"), body = table.tBodies[0], column = heading.cellIndex;
    const rows = [...body.rows];
    const words = rows.some((row) => Number.isNaN(+valueOf(row, column)));
    // Results are first sorted from the largest, names and settings from the smallest.
    const first = words || !heading.dataset.column ? "ascending" : "descending";
    const second = first === "ascending" ? "descending" : "ascending";
    const order = heading.getAttribute("aria-sort") === first ? second : first;
    all("th[aria-sort]", table).forEach((other) => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    rows.sort((one, other) => {
      const [a, b] = [valueOf(one, column), valueOf(other, column)];
      if (a === "" || b === "") return (a === "") - (b === "");
      return sign * compare(a, b);
    });
    body.append(...rows);
  };
  for (const heading of all("table.sortable th[data-sort]")) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => sort(heading));
  }

  // -- switching rows off: in all charts, and in what counts as best ------------------------------------------------
  const mark = (table) => {
    const rows = [...table.tBodies[0].rows];
    all("thead th.ours", table).forEach((heading) => {
      const column = heading.cellIndex, metric = heading.dataset.column;
      rows.forEach((row) => row.children[column].classList.remove("best", "second"));
      if (!(metric in ranked)) return;
      const counted = rows.filter((row) => !hiddenRows.has(row.dataset.row) && !("bound" in row.dataset) && valueOf(row, column) !== "");
      const shown = (row) => Math.round(100 * valueOf(row, column)) / 100;
      const places = [...new Set(counted.map(shown))].sort((a, b) => (ranked[metric] ? b - a : a - b));
      if (places.length < 2) return;
      counted.forEach((row) => {
        if (shown(row) === places[0]) row.children[column].classList.add("best");
        if (shown(row) === places[1]) row.children[column].classList.add("second");
      });
    });
  };
  for (const box of all(".runs input")) {
    const apply = () => {
      box.checked ? hiddenRows.delete(box.value) : hiddenRows.add(box.value);
      const section = box.closest("section"), key = CSS.escape(box.value);
      all(`[data-key="${key}"], tr[data-row="${key}"], label[data-toggle="${key}"]`, section)
        .forEach((each) => each.classList.toggle("off", !box.checked));
      mark(section.querySelector("table.overview"));
    };
    box.addEventListener("change", apply);
    // Pointing at a name shows its lines among many.
    const label = box.closest("label"), section = box.closest("section");
    const focus = (on) => {
      section.classList.toggle("focused", on && box.checked);
      all(`[data-key="${CSS.escape(box.value)}"]`, section).forEach((each) => each.classList.toggle("chosen", on && box.checked));
    };
    label.addEventListener("pointerenter", () => focus(true));
    label.addEventListener("pointerleave", () => focus(false));
    if (!box.checked) apply(); // the browser keeps what was chosen when a page is loaded again
  }

  // -- values under the pointer, or under the arrow keys ------------------------------------------------------------
  const tip = document.getElementById("tip");
  const make = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
    return element;
  };
  const short = (value) => (value === null ? "" : Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4)));
  const clear = (svg) => { all(".guide, .spot", svg).forEach((each) => each.remove()); tip.hidden = true; };

  const say = (heading, lines, x, y) => {
    tip.replaceChildren();
    const title = document.createElement("div");
    title.className = "soft";
    title.textContent = heading;
    const table = document.createElement("table");
    for (const [name, value, style] of lines) {
      const row = table.insertRow(), cell = row.insertCell();
      if (style !== undefined) {
        const dot = document.createElement("span");
        dot.className = `dot c${style}`;
        cell.append(dot);
      }
      cell.append(name);
      row.insertCell().textContent = value;
    }
    tip.append(title, table);
    tip.hidden = false;
    const [wide, high] = [tip.offsetWidth, tip.offsetHeight], page = document.documentElement;
    const left = x + 16 + wide > page.clientWidth - 4 ? x - 16 - wide : x + 16;
    const top = y + 14 + high > window.innerHeight - 4 ? y - 14 - high : y + 14;
    tip.style.left = `${Math.max(4, left) + window.scrollX}px`;
    tip.style.top = `${Math.max(4, top) + window.scrollY}px`;
  };

  const scale = (value, [low, high], first, last, log) => {
    if (log) [value, low, high] = [Math.log10(value), Math.log10(low), Math.log10(high)];
    return first + ((value - low) / (high - low)) * (last - first);
  };
  const lineAt = (svg, data, x) => {
    const [left, right, top, bottom] = data.box;
    const shown = data.series.filter((each) => !hiddenRows.has(each.key));
    const across = (value) => scale(value, data.x, left, right, data.log[0]);
    const up = (value) => scale(value, data.y, bottom, top, data.log[1]);
    const places = [...new Set(shown.flatMap((each) => each.points.filter((p) => p[1] !== null).map((p) => p[0])))].sort((a, b) => a - b);
    if (!places.length) return null;
    const nearest = places.reduce((best, place) => (Math.abs(across(place) - x) < Math.abs(across(best) - x) ? place : best));
    const lines = [], spots = [];
    for (const each of shown) {
      const point = each.points.find((p) => p[0] === nearest);
      if (!point || point[1] === null) continue;
      lines.push([each.name, short(point[1]) + (point.length > 2 ? ` (${short(point[2])} to ${short(point[3])})` : ""), each.style, point[1]]);
      if (!(data.log[1] && point[1] <= 0)) spots.push([across(nearest), up(point[1])]);
    }
    lines.sort((one, other) => other[3] - one[3]);
    const at = data.labels.length ? data.labels[nearest] : short(nearest);
    return { heading: `${data.titles[0]} ${at}`, lines, spots, place: across(nearest), places: places.map(across) };
  };
  const pointAt = (data, x, y) => {
    const [left, right, top, bottom] = data.box;
    const shown = data.series.filter((each) => !hiddenRows.has(each.key))
      .flatMap((each) => each.points.filter((p) => p[1] !== null).map((p) => ({ each, p })));
    if (!shown.length) return null;
    shown.forEach((one) => { one.at = [scale(one.p[0], data.x, left, right, data.log[0]), scale(one.p[1], data.y, bottom, top, data.log[1])]; });
    const far = ({ at }) => Math.hypot(at[0] - x, (y === null ? 0 : at[1] - y));
    const { each, p, at } = shown.reduce((best, one) => (far(one) < far(best) ? one : best));
    const word = data.labels.length ? data.labels[p[0]] : short(p[0]);
    const spread = p.length > 2 ? ` (${short(p[2])} to ${short(p[3])})` : "";
    const lines = [[data.titles[1], short(p[1]) + spread], [data.titles[0], word]];
    return { heading: each.name, lines, spots: [at], place: null, places: shown.map((one) => one.at[0]).sort((a, b) => a - b) };
  };
  const cellAt = (data, x, y) => {
    const [left, right, top, bottom] = data.box;
    const column = Math.floor(((x - left) / (right - left)) * data.columns.length);
    const row = Math.floor(((y - top) / (bottom - top)) * data.rows.length);
    const value = data.values[row]?.[column];
    if (value === undefined || value === null) return null;
    return { heading: short(value), lines: [[data.titles[0], data.rows[row]], [data.titles[1].replace(/ \(.*\)/, ""), data.columns[column]]], spots: [], place: null, places: [] };
  };

  const show = (svg, data, x, y, client) => {
    const found = data.kind === "map" ? cellAt(data, x, y) : data.points ? pointAt(data, x, y) : lineAt(svg, data, x);
    clear(svg);
    if (!found) return null;
    if (found.place !== null) svg.append(make("line", { class: "guide", x1: found.place, x2: found.place, y1: data.box[2], y2: data.box[3] }));
    found.spots.forEach(([cx, cy]) => svg.append(make("circle", { class: "spot", cx, cy, r: 5 })));
    say(found.heading, found.lines, ...client(found));
    return found;
  };
  for (const [identifier, data] of Object.entries(figures)) {
    const canvas = document.querySelector(`#${identifier} .canvas`), svg = canvas?.querySelector("svg");
    if (!svg || !data) continue;
    all("title", svg).forEach((each) => each.remove()); // the tip says it better
    const view = () => svg.viewBox.baseVal.width / svg.getBoundingClientRect().width;
    canvas.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      show(svg, data, (event.clientX - box.left) * view(), (event.clientY - box.top) * view(), () => [event.clientX, event.clientY]);
    });
    canvas.addEventListener("pointerleave", () => clear(svg));
    canvas.addEventListener("blur", () => clear(svg));
    if (data.kind === "map") continue;
    canvas.tabIndex = 0;
    let place = 0;
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (event.key === "Escape") clear(svg);
      if (step === undefined) return;
      event.preventDefault();
      const places = (data.points ? pointAt(data, 0, null) : lineAt(svg, data, 0))?.places ?? [];
      if (!places.length) return;
      place = Math.min(places.length - 1, Math.max(0, all(".guide, .spot", svg).length ? place + step : step < 0 ? places.length - 1 : 0));
      const box = svg.getBoundingClientRect();
      show(svg, data, places[place], null, () => [box.left + places[place] / view(), box.top + box.height / 3]);
    });
  }

  // -- links into closed parts open them; everything is open on paper -----------------------------------------------
  const open = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const details = target && target.closest("details");
    if (details) { details.open = true; details.scrollIntoView(); }
  };
  window.addEventListener("hashchange", open);
  open();
  window.addEventListener("beforeprint", () => all("details").forEach((each) => { each.open = true; }));
})();
