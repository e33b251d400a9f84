"use strict";
// The page of `efcil serve`. Names of classes and files come from anywhere: they are only ever set as text.

const $ = (id) => document.getElementById(id);
const state = { model: null, classes: [], asked: [], selected: null, cards: [], job: null, camera: null, begun: 0 };

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const plural = (count, one, many = one + "s") => `${count.toLocaleString()} ${count === 1 ? one : many}`;
const day = (text) => new Date(text).toLocaleDateString(undefined, { year: "numeric", month: "short", day: "numeric" });
const moment = (text) => new Date(text).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
const percent = (share) => (share === 1 ? "100 %" : share >= 0.9995 ? "> 99.9 %" : share < 0.0005 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`);
const size = (bytes) => (bytes < 1e6 ? `${Math.ceil(bytes / 1e3)} kB` : `${(bytes / 1e6).toFixed(1)} MB`);

function say(id, text) {
  $(id).textContent = text || "";
  $(id).hidden = !text;
}

async function call(path, options = {}) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The server does not answer. Is it still running?");
  }
  if (response.status === 401) location.assign("/login");
  const body = await response.json().catch(() => ({ error: `The server answered with status ${response.status}.` }));
  if (!response.ok) throw new Error(body.error || `The server answered with status ${response.status}.`);
  return body;
}

// -- pictures: dropped, pasted, chosen, photographed ---------------------------------------------------------------

const pictures = (files) => [...files].filter((file) => file.type.startsWith("image/") || /\.(avif|heic|heif|ppm|pgm|pbm|tiff?|bmp|webp)$/i.test(file.name));

async function dropped(transfer) {
  // A folder that is dropped gives its pictures, too.
  const entries = [...transfer.items].map((item) => (item.webkitGetAsEntry ? item.webkitGetAsEntry() : null)).filter(Boolean);
  if (!entries.some((entry) => entry.isDirectory)) return pictures(transfer.files);
  const found = [];
  async function walk(entry) {
    if (entry.isFile) found.push(await new Promise((done, failed) => entry.file(done, failed)));
    else {
      const reader = entry.createReader();
      for (;;) {
        const part = await new Promise((done, failed) => reader.readEntries(done, failed));
        if (!part.length) break;
        for (const inner of part) await walk(inner);
      }
    }
  }
  for (const entry of entries) await walk(entry);
  return pictures(found);
}

function takesPictures(zone, take, complain) {
  let depth = 0;
  const over = (on) => zone.classList.toggle("over", on);
  zone.addEventListener("dragenter", (event) => { event.preventDefault(); depth += 1; over(true); });
  zone.addEventListener("dragleave", () => { depth -= 1; if (depth <= 0) { depth = 0; over(false); } });
  zone.addEventListener("dragover", (event) => event.preventDefault());
  zone.addEventListener("drop", async (event) => {
    event.preventDefault();
    depth = 0;
    over(false);
    const found = await dropped(event.dataTransfer);
    if (found.length) take(found);
    else complain("That was no picture. Drop JPEG, PNG, WebP, GIF, BMP or TIFF files.");
  });
}

function choosesPictures(button, input, take) {
  button.addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    const found = [...input.files];
    input.value = "";
    if (found.length) take(found);
  });
}

// -- the camera ----------------------------------------------------------------------------------------------------

const cameraHere = () => Boolean(navigator.mediaDevices && navigator.mediaDevices.getUserMedia);

function closeCamera() {
  const camera = state.camera;
  if (!camera) return;
  state.camera = null;
  clearInterval(camera.timer);
  camera.stream.getTracks().forEach((track) => track.stop());
  camera.stage.replaceChildren();
  camera.stage.hidden = true;
  camera.closed();
}

async function openCamera(stage, closed, complain) {
  closeCamera();
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment", width: { ideal: 1280 } } });
  } catch (error) {
    complain(error.name === "NotAllowedError" ? "The browser may not use the camera. Allow it in the address bar." : "No camera was found.");
    return null;
  }
  const video = make("video", { playsinline: true, "aria-label": "Camera" });
  video.muted = true;
  video.srcObject = stream;
  stage.replaceChildren(video);
  stage.hidden = false;
  await video.play().catch(() => {});
  state.camera = { stream, stage, closed, video, timer: 0 };
  return state.camera;
}

function frame(video) {
  const canvas = make("canvas");
  const scale = Math.min(1, 1024 / Math.max(video.videoWidth, video.videoHeight, 1));
  canvas.width = Math.max(1, Math.round(video.videoWidth * scale));
  canvas.height = Math.max(1, Math.round(video.videoHeight * scale));
  canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob((blob) => done(new File([blob], "camera.jpg", { type: "image/jpeg" })), "image/jpeg", 0.92));
}

// -- asking --------------------------------------------------------------------------------------------------------

async function ask(files) {
  say("ask-error", "");
  closeCamera();
  for (const old of state.asked) URL.revokeObjectURL(old.url);
  state.asked = files.map((file) => ({ file, url: URL.createObjectURL(file), answer: null }));
  select(state.asked[0]);
  for (const part of portions(state.asked)) await askPart(part);
}

function portions(entries) {
  // A few at a time: the first answers come sooner, and no request grows too large.
  const most = state.model ? state.model.limits.upload_bytes : 2e7;
  const found = [];
  let bytes = Infinity;
  for (const entry of entries) {
    bytes += entry.file.size;
    if (bytes > most || found[found.length - 1].length >= 8) {
      found.push([]);
      bytes = entry.file.size;
    }
    found[found.length - 1].push(entry);
  }
  return found;
}

async function askPart(part) {
  const form = new FormData();
  part.forEach((each) => form.append("image", each.file, each.file.name));
  try {
    const body = await call("/api/predict", { method: "POST", body: form });
    part.forEach((each, number) => { each.answer = body.predictions[number]; });
    if (state.model && body.version !== state.model.version) refresh();
  } catch (error) {
    part.forEach((each) => { each.answer = { error: error.message }; });
  }
  if (part.some((each) => state.asked.includes(each))) showAsked();
}

function select(entry) {
  state.selected = entry;
  showAsked();
}

function showAsked() {
  const stage = $("ask-stage");
  const entry = state.selected;
  $("ask-drop").classList.toggle("full", Boolean(entry) || Boolean(state.camera));
  if (entry) {
    const image = make("img", { src: entry.url, alt: "The picture you asked about" });
    image.addEventListener("error", () => { stage.hidden = true; });
    stage.replaceChildren(image);
    stage.hidden = false;
  }
  const thumbs = $("ask-thumbs");
  thumbs.hidden = state.asked.length < 2;
  thumbs.replaceChildren(...(state.asked.length < 2 ? [] : state.asked.map((each) => make(
    "button", { type: "button", class: "thumb", role: "option", "aria-selected": String(each === entry), onclick: () => select(each) },
    make("img", { src: each.url, alt: "" }), make("span", {}, verdict(each.answer)),
  ))));
  showAnswer(entry ? entry.answer : null, Boolean(entry));
}

function verdict(answer) {
  if (!answer) return "…";
  if (answer.error) return "cannot be read";
  return answer.unknown ? "unknown" : answer.classes[0].name;
}

function showAnswer(answer, waiting) {
  say("ask-error", answer && answer.error);
  $("correct").hidden = !(answer && !answer.error);
  if (!answer || answer.error) {
    $("answer").replaceChildren(...(waiting && !answer ? [make("p", { class: "quiet" }, "Looking at it …")] : []));
    return;
  }
  const best = answer.classes[0];
  const head = answer.unknown
    ? make("div", { class: "verdict unknown" }, make("strong", {}, "Unknown"), make("span", { class: "quiet" }, "It looks like none of the classes. The nearest:"))
    : make("div", { class: "verdict" }, make("strong", {}, best.name), make("span", { class: "quiet" }, `${percent(best.probability)} sure`));
  const rows = answer.classes.map((each) => {
    const bar = make("i");
    bar.style.width = `${100 * each.probability}%`;
    return make("li", {}, make("div", { class: "label" }, make("span", {}, each.name), make("span", {}, percent(each.probability))), make("div", { class: "bar", "aria-hidden": "true" }, bar));
  });
  $("answer").replaceChildren(head, make("ul", { class: answer.unknown ? "answers unknown" : "answers" }, ...rows));
}

async function askCamera() {
  if (!cameraHere()) { $("ask-capture").click(); return; }
  if (state.camera && state.camera.stage === $("ask-stage")) {
    const taken = await frame(state.camera.video);
    ask([taken]);
    return;
  }
  state.asked = [];
  state.selected = null;
  const camera = await openCamera($("ask-stage"), () => { $("ask-camera").textContent = "Camera"; }, (text) => say("ask-error", text));
  if (!camera) return;
  $("ask-camera").textContent = "Take this picture";
  showAsked();
  let busy = false;
  camera.timer = setInterval(async () => {
    if (busy || document.hidden) return;
    busy = true;
    const form = new FormData();
    form.append("image", await frame(camera.video), "camera.jpg");
    try {
      const body = await call("/api/predict", { method: "POST", body: form });
      // An answer that comes after the picture was taken is about an earlier frame.
      if (state.camera === camera) {
        showAnswer(body.predictions[0], true);
        $("correct").hidden = true;
      }
    } catch (error) {
      if (state.camera === camera) say("ask-error", error.message);
    }
    busy = false;
  }, 600);
}

// -- teaching ------------------------------------------------------------------------------------------------------

function addCard(name = "") {
  const root = $("card").content.firstElementChild.cloneNode(true);
  const find = (selector) => root.querySelector(selector);
  const card = { root, files: [], get name() { return find(".name").value.normalize("NFC").trim(); }, set name(text) { find(".name").value = text; } };
  card.name = name;
  card.take = (files) => { for (const file of files) card.files.push({ file, url: URL.createObjectURL(file) }); showCards(); };
  takesPictures(find(".drop"), card.take, (text) => say("teach-error", text));
  choosesPictures(find(".choose"), find(".files"), card.take);
  find(".capture").addEventListener("change", () => { card.take([...find(".capture").files]); find(".capture").value = ""; });
  find(".camera").addEventListener("click", () => teachCamera(card, find(".stage"), find(".camera"), find(".capture")));
  find(".name").addEventListener("input", showCards);
  find(".name").addEventListener("keydown", (event) => { if (event.key === "Enter") find(".choose").focus(); });
  find(".remove").addEventListener("click", () => { removeCard(card); $("another").focus(); });
  state.cards.push(card);
  $("cards").append(root);
  showCards();
  return card;
}

function removeCard(card) {
  if (state.camera && card.root.contains(state.camera.stage)) closeCamera();
  card.files.forEach((each) => URL.revokeObjectURL(each.url));
  state.cards = state.cards.filter((each) => each !== card);
  card.root.remove();
  if (!state.cards.length) addCard();
  showCards();
}

async function teachCamera(card, stage, button, capture) {
  if (!cameraHere()) { capture.click(); return; }
  if (state.camera && state.camera.stage === stage) { closeCamera(); return; }
  const camera = await openCamera(stage, () => { button.textContent = "Camera"; }, (text) => say("teach-error", text));
  if (!camera) return;
  button.textContent = "Close camera";
  const take = async () => card.take([await frame(camera.video)]);
  const end = () => { clearInterval(camera.timer); camera.timer = 0; };
  const begin = (event) => { event.preventDefault(); end(); take(); camera.timer = setInterval(take, 200); };
  const record = make("button", { type: "button", class: "primary" }, "Hold to take pictures");
  record.addEventListener("pointerdown", begin);
  for (const name of ["pointerup", "pointerleave", "pointercancel", "blur"]) record.addEventListener(name, end);
  record.addEventListener("keydown", (event) => { if ((event.key === " " || event.key === "Enter") && !event.repeat) begin(event); });
  record.addEventListener("keyup", end);
  stage.append(record);
}

function showCards() {
  const known = new Set(state.classes.map((each) => each.name));
  for (const card of state.cards) {
    const thumbs = card.files.map((each) => make(
      "button", { type: "button", class: "thumb", title: "Remove this picture", "aria-label": "Remove this picture", onclick: () => { URL.revokeObjectURL(each.url); card.files = card.files.filter((other) => other !== each); showCards(); } },
      make("img", { src: each.url, alt: "" }),
    ));
    card.root.querySelector(".thumbs").replaceChildren(...thumbs);
    const count = card.files.length ? plural(card.files.length, "picture") : "no picture yet";
    const familiar = known.has(card.name);
    const kind = !card.name ? "" : !familiar ? "a new class · " : state.model.learns_more ? "more of a class it knows · " : "it knows this class, and its method cannot learn more of it · ";
    card.root.querySelector(".kind").textContent = kind + count;
    card.root.querySelector(".remove").hidden = state.cards.length === 1 && !card.name && !card.files.length;
  }
  const chosen = state.cards.filter((card) => card.name || card.files.length);
  const complete = chosen.length > 0 && chosen.every((card) => card.name && card.files.length);
  const enough = state.model && (state.model.ready || chosen.length > 1);
  $("learn").disabled = !complete || !enough || Boolean(state.job);
}

function teach(discard = false) {
  say("teach-error", "");
  say("teach-done", "");
  closeCamera();
  const chosen = state.cards.filter((card) => card.name && card.files.length);
  const form = new FormData();
  if (discard) form.append("discard", "true");
  for (const card of chosen) {
    form.append("class", card.name);
    card.files.forEach((each) => form.append("image", each.file, each.file.name));
  }
  const names = chosen.map((card) => card.name).join(", ");
  state.job = { id: null };
  state.begun = performance.now();
  showJob({ state: "sending", names, progress: 0 });
  const request = new XMLHttpRequest();
  request.open("POST", "/api/teach");
  request.upload.addEventListener("progress", (event) => {
    if (event.lengthComputable) showJob({ state: "sending", names, progress: event.loaded / event.total });
  });
  request.addEventListener("load", () => {
    let body = {};
    try { body = JSON.parse(request.responseText); } catch { /* said below */ }
    if (request.status !== 202) jobFailed(body.error || `The server answered with status ${request.status}.`);
    else follow(body.id);
  });
  request.addEventListener("error", () => jobFailed("The server does not answer. Is it still running?"));
  request.send(form);
}

function follow(id) {
  state.job = { id };
  showCards();
  const source = new EventSource(`/api/jobs/${id}`);
  let failures = 0;
  source.addEventListener("message", (event) => {
    failures = 0;
    const job = JSON.parse(event.data);
    if (["done", "failed", "stopped"].includes(job.state)) {
      source.close();
      ended(job);
    } else showJob({ ...job, names: job.classes.map((each) => each.name).join(", ") });
  });
  source.addEventListener("error", () => {
    failures += 1;
    if (failures > 4) {
      source.close();
      jobFailed("The connection to the server was lost. Load the page again to see what became of the teaching.");
    }
  });
}

const STEPS = { sending: "Sending the pictures", starting: "Getting ready", learning: "Learning", stopping: "Saving its state, then stopping", loading: "The new model takes over" };

function showJob(job) {
  $("job").hidden = false;
  $("job-title").textContent = `Learning ${job.names}`;
  const sure = job.progress !== null && job.progress !== undefined && ["sending", "learning"].includes(job.state);
  const bar = $("job-bar");
  bar.classList.toggle("unsure", !sure);
  if (sure) {
    bar.setAttribute("aria-valuenow", String(Math.round(100 * job.progress)));
    bar.firstElementChild.style.width = `${100 * job.progress}%`;
  } else bar.removeAttribute("aria-valuenow");
  let text = STEPS[job.state] || job.state;
  if (job.state === "learning" && job.epoch) text += ` · round ${job.epoch} of ${job.epochs}`;
  else if (job.messages && job.messages.length && job.state !== "stopping") text = `${text} · ${job.messages[job.messages.length - 1]}`;
  if (job.seconds_left > 1) text += ` · ${Math.round(job.seconds_left)} s left`;
  $("job-text").textContent = `${text}. Questions are answered by the old model meanwhile.`;
  $("job-stop").disabled = !job.id || job.state === "loading";
  showCards();
}

function jobFailed(text) {
  state.job = null;
  $("job").hidden = true;
  say("teach-error", text);
  refresh();
}

async function ended(job) {
  if (job.state === "failed") { jobFailed(job.error); return; }
  state.job = null;
  $("job").hidden = true;
  if (job.state === "done") {
    const seconds = state.begun ? ` in ${Math.max(1, Math.round((performance.now() - state.begun) / 1000))} s` : "";
    const images = job.classes.reduce((sum, each) => sum + each.images, 0);
    const names = job.classes.map((each) => each.name);
    for (const card of [...state.cards]) if (names.includes(card.name)) removeCard(card);
    say("teach-done", `Learned ${job.kind === "more" ? "more of " : ""}${names.join(", ")} from ${plural(images, "picture")}${seconds}. The server has dropped the pictures.`);
    state.fresh = new Set(names);
  } else say("teach-done", "Stopped. The model is as it was before.");
  await refresh();
  if (job.state === "done" && state.asked.length) ask(state.asked.map((each) => each.file));
}

// -- what the model is -----------------------------------------------------------------------------------------------

async function refresh() {
  let model, classes;
  try {
    [model, classes] = await Promise.all([call("/api/model"), call("/api/classes")]);
  } catch (error) {
    notices([[error.message]]);
    return;
  }
  state.model = model;
  state.classes = classes.classes;
  document.title = `${model.name} · efcil`;
  $("name").textContent = model.name;
  $("facts").replaceChildren(
    model.ready ? `knows ${plural(model.classes, "class", "classes")}` : "knows nothing yet",
    make("span", { class: "technical" }, model.ready ? ` · ${model.method} on ${model.network}, ${model.image_size} px, ${model.device}` : ""));
  $("version").textContent = model.version ? `state ${model.version}` : "";
  $("known").replaceChildren(...(model.learns_more ? state.classes.map((each) => make("option", { value: each.name })) : []));
  $("teach-hint").textContent = model.ready
    ? "Name a class and give some pictures of it. Ten good ones are a start; what it knows already stays."
    : "It knows nothing yet. Give it its first classes, at least two, with some pictures of each.";
  if (!model.ready && state.cards.length < 2) addCard();
  showKnown();
  showStored();
  showNotices();
  showCards();
  if (model.teaching && !state.job) follow(model.teaching);
}

function showKnown() {
  const fresh = state.fresh || new Set();
  $("classes").replaceChildren(state.classes.length
    ? make("ul", { class: "tiles" }, ...state.classes.map((each) => make("li", { class: fresh.has(each.name) ? "tile new" : "tile" }, make("strong", {}, each.name), make("span", { class: "quiet" }, plural(each.images, "picture")), make("span", { class: "quiet" }, day(each.learned)), each.measured ? make("span", { class: "quiet" }, `${each.right} of ${each.measured} right`) : null,
      make("button", { type: "button", "aria-label": `Change ${each.name}`, title: "Rename, merge or forget", onclick: () => edit(each.name) }, "⋯"))))
    : make("p", { class: "quiet" }, "Nothing yet."));
  const visits = state.model.visits;
  $("visits-box").hidden = !visits.length;
  const measured = visits.some((each) => each.measured);
  const heads = ["when", "what", ...(measured ? ["right, of pictures not learned from"] : [])].map((text) => make("th", { scope: "col" }, text));
  const rows = visits.map((each) => make("tr", {}, make("td", {}, moment(each.date)),
    make("td", {}, `${VISITS[each.kind] ?? `${each.kind} `}${plural(each.classes, "class", "classes")}, ${plural(each.images, "picture")}`),
    measured ? make("td", {}, score(each.measured)) : null));
  $("visits").replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows)));
}

const VISITS = { task: "", more: "more of ", rename: "renamed ", forget: "forgot ", merge: "merged " };

function score(measured) {
  if (!measured) return "–";
  return `${Math.round((100 * measured.right) / measured.images)} % (${measured.right} of ${measured.images}, among ${plural(measured.among, "class", "classes")})`;
}

function showStored() {
  const model = state.model;
  $("stored-sum").textContent = model.ready
    ? `${size(model.bytes)} of weights and statistics. No picture, no file name: those you ask about are looked at in memory, those you teach are dropped once they have been learned from.`
    : "Nothing yet.";
  $("stored-box").hidden = !model.stored.length;
  const list = make("dl", { class: "stored" });
  for (const each of model.stored) list.append(
    make("dt", {}, `${each.title} · ${plural(each.numbers, "number")}, ${size(each.bytes)}`),
    make("dd", {}, `To ${each.use}.`),
    make("dd", { class: "quiet" }, each.recovery));
  $("stored-list").replaceChildren(list);
}

function notices(list) {
  $("notices").replaceChildren(...list.map(([text, label, action]) => make("div", { class: "notice" }, make("p", {}, text),
    label ? make("button", { type: "button", onclick: action }, label) : null)));
}

function showNotices() {
  const list = [];
  const { problem, unfinished } = state.model;
  if (problem) list.push([problem]);
  if (unfinished) {
    const names = unfinished.classes.join(", ");
    const how = unfinished.problem
      ? unfinished.problem
      : `A teaching of ${names} was interrupted. No picture was kept, so give the same ones again to ${unfinished.saved ? "resume where it stopped" : "start it over"}, or discard it.`;
    list.push([how, "Discard", async () => {
      try { await call("/api/unfinished", { method: "DELETE" }); } catch (error) { say("teach-error", error.message); }
      refresh();
    }]);
    const open = state.cards.length === 1 && !state.cards[0].name && !state.cards[0].files.length;
    if (open && unfinished.classes.length && !unfinished.problem) {
      state.cards[0].name = unfinished.classes[0];
      unfinished.classes.slice(1).forEach((name) => addCard(name));
    }
  }
  notices(list);
}

// -- renaming, merging, forgetting -----------------------------------------------------------------------------------

function edit(name) {
  state.edited = { name, sure: false };
  $("edit-title").textContent = name;
  $("edit-name").value = name;
  $("edit-forget").textContent = "Forget it";
  say("edit-error", "");
  showEdit();
  $("edit").showModal();
  $("edit-name").select();
}

function showEdit() {
  const wanted = $("edit-name").value.normalize("NFC").trim();
  const other = wanted !== state.edited.name && state.classes.some((each) => each.name === wanted);
  $("edit-save").textContent = other ? "Merge" : "Rename";
  $("edit-save").disabled = !wanted || wanted === state.edited.name;
  $("edit-hint").textContent = state.edited.sure
    ? "Everything that is stored about this class alone will be removed. This cannot be undone."
    : other ? `${state.edited.name} and ${wanted} become one class.` : "";
}

async function change(path, body) {
  try {
    await call(`/api/classes/${path}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    $("edit").close();
  } catch (error) {
    say("edit-error", error.message);
  }
  refresh();
}

function startEditing() {
  $("edit-name").addEventListener("input", showEdit);
  $("edit-close").addEventListener("click", () => $("edit").close());
  $("edit-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const wanted = $("edit-name").value.normalize("NFC").trim();
    const name = state.edited.name;
    if (!wanted || wanted === name) return;
    if (state.classes.some((each) => each.name === wanted)) change("merge", { names: [wanted, name], into: wanted });
    else change("rename", { name, to: wanted });
  });
  $("edit-forget").addEventListener("click", () => {
    if (state.edited.sure) change("forget", { names: [state.edited.name] });
    else {
      state.edited.sure = true;
      $("edit-forget").textContent = "Really forget it";
      showEdit();
    }
  });
}

// -- start -----------------------------------------------------------------------------------------------------------

function start() {
  takesPictures($("ask-drop"), ask, (text) => say("ask-error", text));
  choosesPictures($("ask-choose"), $("ask-files"), ask);
  $("ask-capture").addEventListener("change", () => { ask([...$("ask-capture").files]); $("ask-capture").value = ""; });
  $("ask-camera").addEventListener("click", askCamera);
  // A picture dropped beside a zone must not make the browser leave the page.
  for (const name of ["dragover", "drop"]) window.addEventListener(name, (event) => event.preventDefault());
  document.addEventListener("paste", (event) => {
    const found = pictures(event.clipboardData.files);
    if (found.length) { event.preventDefault(); ask(found); }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") closeCamera(); });
  $("another").addEventListener("click", () => addCard().root.querySelector(".name").focus());
  $("learn").addEventListener("click", () => teach());
  $("job-stop").addEventListener("click", () => { if (state.job && state.job.id) call(`/api/jobs/${state.job.id}`, { method: "DELETE" }).catch((error) => say("teach-error", error.message)); });
  $("correct").addEventListener("submit", (event) => {
    event.preventDefault();
    const name = $("correct-name").value.normalize("NFC").trim();
    if (!name || !state.selected) return;
    const card = state.cards.find((each) => each.name === name) || state.cards.find((each) => !each.name && !each.files.length) || addCard();
    card.name = name;
    card.take([state.selected.file]);
    $("correct-name").value = "";
    card.root.scrollIntoView({ block: "nearest" });
  });
  startEditing();
  addCard();
  refresh();
  setInterval(() => { if (!document.hidden && !state.job) refresh(); }, 10000);
}

start();
