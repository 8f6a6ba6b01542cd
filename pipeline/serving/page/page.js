// Streams an answer and paints each decode step. Text from the server only ever becomes textContent.

const HUES = 4;
const SCALE = 8; // tokens of a bar of full height, or more where a step had more
const PLAIN = "-plain";
const LINES = 12; // of a record that is not folded
const element = (id) => document.getElementById(id);
const ENDED = ["completed", "failed", "expired", "cancelled"]; // statuses of a batch
const LOOK_MILLISECONDS = 3000;
let nextLook = null; // the timer of the next look at the batches
let running = null; // the AbortController of what is being generated

function headers() {
  const key = element("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function refusal(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not this server's own answer: the status has to do
  }
  if (response.status === 401) {
    element("key-field").hidden = false;
    element("key").focus();
  }
  return new Error(message);
}

async function loadModels() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw await refusal(response);
  const names = (await response.json()).data.map((model) => model.id);
  element("model").replaceChildren(...names.map((name) => new Option(name, name)));
  offerComparison();
}

function plainName() {
  const name = element("model").value + PLAIN;
  return [...element("model").options].some((option) => option.value === name) ? name : null;
}

function offerComparison() {
  element("compare-field").hidden = plainName() === null;
}

function say(message, kind = "") {
  element("status").textContent = message;
  element("status").className = kind;
}

/** One answer's place on the page. */
class Panel {
  constructor(title) {
    this.root = element("answer").content.firstElementChild.cloneNode(true);
    this.root.querySelector("h2").textContent = title;
    this.text = this.root.querySelector(".text");
    this.bars = this.root.querySelector(".steps");
    this.steps = [];
    this.runs = 0;
    this.said = ""; // without what was thought before
    element("answers").append(this.root);
  }

  show(figure, value) {
    const place = this.root.querySelector(`[data-figure="${figure}"]`);
    place.textContent = value;
    place.parentElement.hidden = false;
  }

  /** Add a step's text; one that ends the reasoning comes in two pieces, of which the first has its figures. */
  add({ reasoning_content: thought = "", content = "" }, speculation) {
    if (speculation) this.step(speculation);
    if (!this.run) return;
    const atEnd = this.text.scrollTop + this.text.clientHeight >= this.text.scrollHeight - 4;
    if (thought) this.run.append(marked(thought, "thought"));
    this.run.append(...parts(content ?? "", this.forced));
    this.said += content ?? "";
    if (atEnd) this.text.scrollTop = this.text.scrollHeight;
  }

  step({ tokens, accepted, forced = [] }) {
    const hue = accepted > 0 ? `hue-${this.runs++ % HUES}` : "alone";
    const run = document.createElement("span");
    this.run = run;
    this.forced = forced;
    run.className = accepted > 0 ? `run ${hue}` : hue;
    run.title = `${tokens} ${tokens === 1 ? "token" : "tokens"} in one forward, ${accepted} of them drafted`;
    this.text.append(run);
    this.steps.push({ tokens, hue });
    const total = this.steps.reduce((sum, step) => sum + step.tokens, 0);
    this.show("tokens", total);
    this.show("forwards", this.steps.length);
    this.show("length", (total / this.steps.length).toFixed(2));
    this.paintBars();
  }

  paintBars() {
    const most = Math.max(SCALE, ...this.steps.map((step) => step.tokens));
    const width = Math.max(this.steps.length, 40);
    this.bars.setAttribute("viewBox", `0 0 ${width} ${most}`);
    this.bars.replaceChildren(
      ...this.steps.map((step, place) => {
        const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
        bar.setAttribute("x", place + 0.1);
        bar.setAttribute("y", most - step.tokens);
        bar.setAttribute("width", 0.8);
        bar.setAttribute("height", step.tokens);
        bar.setAttribute("class", step.hue);
        return bar;
      }),
    );
  }

  finish(statistics) {
    this.rate = statistics.num_output_tokens / statistics.seconds;
    this.show("rate", this.rate.toFixed(0));
    this.show("first", `${(1000 * statistics.seconds_to_first_token).toFixed(0)} ms`);
  }

  /** Show an answer by a schema as the record that it is, unless it was cut short. */
  record(statistics, whole) {
    this.show("forced", statistics.num_forced_tokens);
    this.show("record", whole ? "valid" : "cut short");
    if (!whole) return;
    const place = this.root.querySelector(".record");
    const listing = JSON.stringify(JSON.parse(this.said), null, 2);
    const lines = listing.split("\n").length;
    place.querySelector("pre").textContent = listing;
    place.querySelector("summary").textContent = `Record, ${lines} ${lines === 1 ? "line" : "lines"}`;
    place.open = lines <= LINES;
    place.hidden = false;
  }
}

/** Split a text into what was free and what was forced, by the (start, end) of the latter in characters. */
function parts(content, forced) {
  const characters = [...content]; // not UTF-16 units
  const text = (start, end) => characters.slice(start, end).join("");
  const found = [];
  let shown = 0;
  for (const [start, end] of forced) {
    found.push(text(shown, start), marked(text(start, end), "forced"));
    shown = end;
  }
  return [...found, text(shown)];
}

function marked(text, name) {
  const mark = document.createElement("span");
  mark.className = name;
  mark.textContent = text;
  return mark;
}

/** Return the schema that was given, null if none was; throws where it is not JSON. */
function schema() {
  const given = element("schema").value.trim();
  if (!given) return null;
  try {
    return JSON.parse(given);
  } catch (error) {
    throw new Error(`the schema is not JSON: ${error.message}`);
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection was closed before the end");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function generate(model, title) {
  const panel = new Panel(title);
  const asked = schema();
  const body = {
    model,
    messages: [{ role: "user", content: element("prompt").value }],
    temperature: element("temperature").valueAsNumber,
    max_tokens: element("tokens").valueAsNumber,
    seed: element("seed").valueAsNumber,
    stream: true,
    speculation: true,
    ...(asked === null ? {} : { response_format: { type: "json_schema", json_schema: { name: "record", schema: asked } } }),
  };
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers(),
    body: JSON.stringify(body),
    signal: running.signal,
  });
  if (!response.ok) throw await refusal(response);
  for await (const event of events(response)) {
    const [choice] = event.choices;
    if (choice?.finish_reason) {
      panel.finish(event.speculation);
      if (asked !== null) panel.record(event.speculation, choice.finish_reason === "stop");
    } else if (choice) panel.add(choice.delta, event.speculation);
  }
  return panel;
}

async function run() {
  running = new AbortController();
  element("run").disabled = true;
  element("stop").disabled = false;
  element("answers").replaceChildren();
  try {
    if (!element("model").value) await loadModels();
    const model = element("model").value;
    const compare = element("compare").checked && plainName();
    say("Generating …");
    const drafted = await generate(model, compare ? "with a draft" : model);
    if (!compare) {
      say("Done.");
      return;
    }
    say("And now without a draft …");
    const plain = await generate(compare, "without");
    const same = drafted.text.textContent === plain.text.textContent;
    const times = (drafted.rate / plain.rate).toFixed(2);
    say(`${times} × the speed of plain decoding, ${same ? "the same text" : "another text"}.`, "good");
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else say(`That did not work: ${error.message}`, "error");
  } finally {
    running = null;
    element("run").disabled = false;
    element("stop").disabled = true;
  }
}

/** Show the newest batches of the key, and again while one of them has not ended; nothing where there are none. */
async function showBatches() {
  clearTimeout(nextLook);
  const response = await fetch("v1/batches?limit=20", { headers: headers() });
  const batches = response.ok ? (await response.json()).data : [];
  element("batches").hidden = batches.length === 0;
  element("batches").querySelector("tbody").replaceChildren(...batches.map(batchRow));
  if (batches.some((batch) => !ENDED.includes(batch.status))) {
    nextLook = setTimeout(() => showBatches().catch((error) => say(error.message, "error")), LOOK_MILLISECONDS);
  }
}

function batchRow(batch) {
  const { total, completed, failed } = batch.request_counts;
  const bar = document.createElement("progress");
  bar.max = Math.max(total, 1);
  bar.value = completed + failed;
  bar.title = `${completed + failed} of ${total}`;
  const problems = (batch.errors?.data ?? []).map((problem) => problem.message);
  const status = document.createElement("td");
  status.append(batch.status.replace("_", " "), " ", bar);
  status.title = problems.join("\n");
  const row = document.createElement("tr");
  row.append(cell(batch.id), status, cell(completed), cell(failed), cell(total));
  return row;
}

function cell(value) {
  const made = document.createElement("td");
  made.textContent = value;
  return made;
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
element("stop").addEventListener("click", () => running?.abort());
element("model").addEventListener("change", offerComparison);
const load = () => loadModels().then(showBatches);
element("key").addEventListener("change", () => load().then(() => say(""), (error) => say(error.message, "error")));
load().catch((error) => say(error.message, "error"));
