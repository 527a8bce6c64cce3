// The page at / of kvrag's server. Text of documents, prompts and answers is hostile: it becomes text nodes, never markup.

const COLLECTION = "kvrag-page", CHOSEN = 5, SHOWN = 7, MAX_TOKENS = 80;
const KINDS = {
  exact: "kept, and equal to a full prefill's",
  reused: "kept from elsewhere: an approximation",
  repaired: "kept, then computed again",
  computed: "computed for this prompt",
};
const LABELS = { exact: "equal to a full prefill", repaired: "approximate", full: "nothing reused" };
const STAGES = {
  plan: "find passages", wait: "wait for others", history: "take earlier turns", load: "read kept KV", stitch: "place it", select: "choose rows",
  repair: "repair, compute the rest", prefill: "compute all rows", decode: "first token", other: "between stages",
};

const $ = (id) => document.getElementById(id);
const make = (tag, className = "", text = "") => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.textContent = text;
  return made;
};
const number = (value) => value.toLocaleString("en");
const ms = (value) => (value < 10 ? value.toFixed(1) : number(Math.round(value))) + " ms";

let model = "", corpus = { passages: [], questions: [] }, prepared = new Set(), running = null, choices = new Map();

// ── the API ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

async function call(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  let response;
  try {
    response = await fetch(path, body ? { method: "POST", headers, body: JSON.stringify(body), signal } : { headers, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server can't be reached. Is kvrag serve still running?");
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  const again = response.status === 503 && response.headers.get("Retry-After");
  const message = told?.error?.message ?? `The server answered with status ${response.status}`;
  if (response.status === 401) $("key-box").open = true;
  throw new Error(`${sentence(message)}${again ? ` Try again in ${again} s.` : ""}`);
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw new Error("The connection broke off before the answer's end. Is kvrag serve still running?");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.map((each) => each.trim()).filter((each) => each.startsWith("data:"))) {
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(5));
    }
  }
}

async function answer(mode, passages, question, into, signal) {
  const content = `Answer the question from the passages above, in one or two sentences.\n\nQuestion: ${question}`;
  const kvrag = { mode, trace: true, documents: passages.map(({ text }) => ({ text })) };
  const body = { model, messages: [{ role: "user", content }], max_tokens: MAX_TOKENS, temperature: 0, kvrag };
  const started = performance.now();
  let browserMs = null, account = null, isCut = false;
  const response = await call("v1/chat/completions", { ...body, stream: true, stream_options: { include_usage: true } }, signal);
  for await (const event of events(response)) {
    if (event.error) throw new Error(sentence(event.error.message));
    const { content: text, reasoning_content: thought } = event.choices[0]?.delta ?? {};
    if (text || thought) browserMs ??= performance.now() - started;
    if (thought) {
      if (into.lastChild?.nodeName !== "EM") into.append(document.createElement("em"));
      into.lastChild.append(thought);
    }
    if (text) into.append(text);
    isCut ||= event.choices[0]?.finish_reason === "length";
    account = event.kvrag?.[0] ?? account;
  }
  return { ...account, browserMs, isCut };
}

// ── passages: ranking and preparing ──────────────────────────────────────────────────────────────────────────────────────

const words = (text) => text.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];

function ranked(question, passages) {
  const bags = passages.map(({ text }) => words(text));
  const mean = bags.reduce((sum, bag) => sum + bag.length, 0) / (bags.length || 1);
  const terms = new Set(words(question));
  const scores = bags.map((bag) => {
    let score = 0;
    for (const term of terms) {
      const count = bag.filter((word) => word === term).length, holders = bags.filter((other) => other.includes(term)).length;
      const weight = Math.log(1 + (bags.length - holders + 0.5) / (holders + 0.5));
      score += (weight * count * 2.2) / (count + 1.2 * (0.25 + (0.75 * bag.length) / mean));
    }
    return score;
  });
  return passages.map((passage, at) => ({ ...passage, score: scores[at] })).sort((a, b) => b.score - a.score);
}

function withId(passage) {
  let hash = 0xcbf29ce484222325n; // FNV-1a: ids only have to tell texts apart
  for (const byte of new TextEncoder().encode(passage.text)) hash = BigInt.asUintN(64, (hash ^ BigInt(byte)) * 0x100000001b3n);
  return { ...passage, id: `page-${hash.toString(16)}` };
}

function own() {
  const texts = $("own").value.split(/^\s*---+\s*$/m).map((text) => text.trim()).filter(Boolean);
  return texts.map((text) => withId({ title: text.split("\n")[0].slice(0, 80), text, isOwn: true }));
}

const all = () => [...own(), ...corpus.passages];

function listPassages() {
  const order = ranked($("question").value, all());
  const mine = order.filter(({ isOwn }) => isOwn), demo = order.filter(({ isOwn }) => !isOwn);
  const chosen = new Set([...mine, ...demo.slice(0, Math.max(0, CHOSEN - mine.length))].map(({ id }) => id));
  const shown = [...mine, ...demo.slice(0, Math.max(2, SHOWN - mine.length))];
  $("passages").replaceChildren(...shown.map((passage) => {
    const item = make("li"), label = make("label"), box = make("input"), more = make("details");
    Object.assign(box, { type: "checkbox", checked: choices.get(passage.id) ?? chosen.has(passage.id), value: passage.id });
    box.onchange = () => choices.set(passage.id, box.checked);
    label.append(box, make("span", "title", passage.title));
    if (prepared.has(passage.id)) label.append(make("span", "tag", "prepared"));
    more.append(make("summary", "", "text"), make("p", "text", passage.text));
    more.firstChild.setAttribute("aria-label", `text of ${passage.title}`);
    item.append(label, more);
    return item;
  }));
  const ready = all().filter(({ id }) => prepared.has(id)).length;
  $("prepared").textContent = `${ready} of ${all().length} passages are prepared on this server.`;
}

function chosenPassages() {
  const ids = new Map(all().map((passage) => [passage.id, passage]));
  return [...$("passages").querySelectorAll("input:checked")].map((box) => ids.get(box.value)).filter(Boolean);
}

async function prepare(passages, signal, tell = () => {}) {
  const left = passages.filter(({ id }) => !prepared.has(id)), progress = $("progress"), skipped = [];
  for (let at = 0; at < left.length; at += 2) {
    Object.assign(progress, { hidden: false, value: at, max: left.length });
    $("prepared").textContent = `Preparing: ${at} of ${left.length}. Done once; answers find the KV from then on.`;
    tell(`Preparing passages, once: ${at} of ${left.length}…`);
    const batch = left.slice(at, at + 2), documents = batch.map(({ id, text }) => ({ id, text }));
    const response = await call("v1/kv/precompute", { documents, collection: COLLECTION }, signal);
    const report = await response.json();
    skipped.push(...report.failed, ...report.short);
    batch.filter(({ id }) => !skipped.some(([other]) => other === id)).forEach(({ id }) => prepared.add(id));
  }
  progress.hidden = true;
  listPassages();
  if (skipped.length) $("prepared").append(` ${skipped.length} are computed each time: ${sentence(skipped[0][1])}`);
}

// ── what is shown ────────────────────────────────────────────────────────────────────────────────────────────────────────

function showMap({ tokens, sources }) {
  const counts = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, 0])), runs = [], strip = [];
  let at = 0;
  for (const [kind, rows] of sources) {
    const run = make("span", `run ${kind}`), piece = make("span", kind);
    run.append(...tokens.slice(at, at + rows).map((token) => make("i", "", token)));
    run.title = `${kind}, ${rows} token${rows === 1 ? "" : "s"}`;
    piece.style.flexGrow = rows;
    runs.push(run);
    strip.push(piece);
    counts[kind] += rows;
    at += rows;
  }
  $("prompt").replaceChildren(...runs);
  $("strip").replaceChildren(...strip);
  $("legend").replaceChildren(...Object.entries(KINDS).map(([kind, about]) => {
    const button = make("button", kind), share = Math.round((100 * counts[kind]) / tokens.length);
    button.type = "button";
    button.setAttribute("aria-pressed", "false");
    button.append(make("span", "swatch"), make("strong", "", kind), make("span", "count", `${number(counts[kind])} · ${share}%`), make("span", "about", about));
    button.onclick = () => {
      const only = $("map").dataset.only === kind ? "" : kind;
      $("map").dataset.only = only;
      for (const other of $("legend").children) other.setAttribute("aria-pressed", String(other === button && only !== ""));
    };
    return button;
  }));
  $("map").dataset.only = "";
  $("map").hidden = false;
}

function untilFirst({ stages, ttft_ms }) {
  const cut = stages.map(([name, start, end]) => [name, start, Math.min(end, ttft_ms)]);
  return cut.filter(([, start, end]) => end > start);
}

function showTimes(made) {
  const longest = Math.max(...made.map(([, { ttft_ms }]) => ttft_ms)), sums = made.map(() => ({}));
  $("bars").replaceChildren(...made.map(([name, account], at) => {
    const row = make("div", "bar-row"), bar = make("div", "bar");
    for (const [stage, start, end] of untilFirst(account)) {
      const piece = make("span", `stage ${stage}`);
      piece.style.left = `${(100 * start) / longest}%`;
      piece.style.width = `${(100 * (end - start)) / longest}%`;
      bar.append(piece);
      sums[at][stage] = (sums[at][stage] ?? 0) + end - start;
    }
    const other = account.ttft_ms - Object.values(sums[at]).reduce((sum, value) => sum + value, 0);
    if (other > account.ttft_ms / 100) sums[at].other = other; // auto measures the machine once, and weighs
    row.append(make("span", "bar-name", name), bar, make("strong", "bar-ms", ms(account.ttft_ms)));
    return row;
  }));
  $("stage-head").replaceChildren(make("th", "", "stage"), ...made.map(([name]) => make("th", "", name)));
  const used = Object.keys(STAGES).filter((stage) => sums.some((sum) => stage in sum));
  const line = (head, cells) => {
    const row = make("tr");
    head.scope = "row";
    row.append(head, ...cells.map((cell) => make("td", "", cell)));
    return row;
  };
  $("stages").replaceChildren(...used.map((stage) => {
    const head = make("th");
    head.append(make("span", `swatch ${stage}`), STAGES[stage]);
    return line(head, sums.map((sum) => (stage in sum ? ms(sum[stage]) : "–")));
  }), line(make("th", "", "all, to the first token"), made.map(([, { ttft_ms }]) => ms(ttft_ms))));
  $("times").hidden = false;
}

const accountOf = (made) =>
  `${number(made.cached_tokens)} tokens kept, ${number(made.repaired_tokens)} repaired, ${number(made.computed_tokens)} computed: ` +
  `${LABELS[made.exactness]}.${made.isCut ? ` Cut after ${MAX_TOKENS} tokens.` : ""}${made.fallback_reason ? ` Less reuse than could be: ${sentence(made.fallback_reason)}` : ""}`;

function showRatio(reuse, full) {
  const ratio = full.ttft_ms / reuse.ttft_ms, times = (ratio >= 1 ? ratio : 1 / ratio).toFixed(1);
  const word = times === "1.0" ? "as soon" : `${times} × ${ratio > 1 ? "sooner" : "later"}`;
  $("headline").replaceChildren("First token ", make("em", ratio < 1 ? "later" : "", word));
  $("clocks").textContent = `${ms(reuse.ttft_ms)} with kept KV, ${ms(full.ttft_ms)} with a full prefill, as the server measured; ` +
    `${ms(reuse.browserMs ?? 0)} and ${ms(full.browserMs ?? 0)} in this browser, with the network and the queue.`;
}

// ── one question ─────────────────────────────────────────────────────────────────────────────────────────────────────────

async function ask(signal) {
  const question = $("question").value.trim(), passages = chosenPassages();
  for (const id of ["answer-reuse", "answer-full", "account", "account-full", "headline", "clocks"]) $(id).replaceChildren();
  for (const id of ["hello", "times", "map", "full"]) $(id).hidden = true;
  $("answers").hidden = false;
  if (matchMedia("(max-width: 56rem)").matches) $("answers").scrollIntoView();
  await prepare(passages, signal, (text) => $("headline").replaceChildren(text));
  $("headline").textContent = "Answering…";
  const reuse = await answer($("mode").value, passages, question, $("answer-reuse"), signal);
  $("account").textContent = accountOf(reuse);
  $("headline").textContent = `First token after ${ms(reuse.ttft_ms)}`;
  showTimes([["kept KV", reuse]]);
  showMap(reuse);
  if (!$("compare").checked) return;
  $("full").hidden = false;
  const full = await answer("full", passages, question, $("answer-full"), signal);
  $("account-full").textContent = accountOf(full);
  showRatio(reuse, full);
  showTimes([["kept KV", reuse], ["full prefill", full]]);
}

function report(error) {
  $("fault").textContent = error.name === "AbortError" ? "Stopped." : error.message;
  $("fault").hidden = false;
}

async function run(work) {
  running?.abort();
  const own = (running = new AbortController());
  $("fault").hidden = true;
  $("go").textContent = "Stop";
  document.body.setAttribute("aria-busy", "true");
  try {
    await work(own.signal);
  } catch (error) {
    if (running === own) {
      report(error);
      for (const [text, box] of [["answer-full", "full"], ["answer-reuse", "answers"]]) $(box).hidden ||= !$(text).textContent;
      if ($("headline").textContent === "Answering…") $("headline").textContent = "The answer was broken off";
    }
  }
  if (running !== own) return;
  running = null;
  $("go").textContent = "Ask";
  $("progress").hidden = true;
  document.body.removeAttribute("aria-busy");
}

async function connect(signal) {
  $("model").textContent = "no connection";
  model = (await (await call("v1/models", null, signal)).json()).data[0].id;
  $("model").textContent = model;
  const { data } = await (await call(`v1/kv/documents?collection=${COLLECTION}`, null, signal)).json();
  prepared = new Set(data.map((id) => id.replace(`${COLLECTION}/`, "")));
  listPassages();
}

$("form").onsubmit = (event) => {
  event.preventDefault();
  if (running) return running.abort();
  run(async (signal) => {
    if (!model) await connect(signal);
    await ask(signal);
  });
};
$("prepare").onclick = () => run(async (signal) => {
  if (!model) await connect(signal);
  await prepare(all(), signal);
});
$("remove").onclick = () => run(async (signal) => {
  await call("v1/kv/delete", { collection: COLLECTION }, signal);
  await connect(signal);
});
$("question").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) $("form").requestSubmit();
};
$("question").oninput = $("own").oninput = () => (choices.clear(), listPassages());
$("key").onchange = () => {
  sessionStorage.setItem("kvrag-key", $("key").value);
  $("fault").hidden = true;
  connect().catch(report);
};

$("key").value = sessionStorage.getItem("kvrag-key") ?? "";
corpus = await (await call("page/corpus.json")).json();
corpus.passages = corpus.passages.map(withId);
$("corpus-name").textContent = corpus.name;
$("question").value = corpus.questions[0];
$("samples").replaceChildren(...corpus.questions.slice(0, 4).map((question) => {
  const chip = make("button", "chip", question);
  chip.type = "button";
  chip.onclick = () => {
    $("question").value = question;
    $("question").oninput();
  };
  return chip;
}));
listPassages();
connect().catch(report);
