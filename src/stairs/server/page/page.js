// A conversation with the model this server serves. Nothing here leaves this origin.

const $ = (id) => document.getElementById(id);
const talk = $("talk"), form = $("form"), prompt = $("prompt"), send = $("send"), stop = $("stop");
const KEPT = "stairs.conversation";
const IDEAS = [
  "What is the capital of France?",
  "Write a short poem about a staircase.",
  "Explain in two sentences why the sky is blue.",
];

let messages = []; // what the model is sent: {role, content}
let shown = []; // what the page shows: {question, answer, error, card}
let running = null; // the AbortController of the answer being written

// -- figures -----------------------------------------------------------------------------------

const seconds = (s) => (s == null ? "–" : s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(1)} s`);
const rate = (r) => (r == null ? "–" : r < 10 ? r.toFixed(1) : String(Math.round(r)));

function bytes(n) {
  if (n == null) return "–";
  const units = ["B", "kB", "MB", "GB"];
  let i = 0;
  while (n >= 1000 && i < units.length - 1) { n /= 1000; i += 1; }
  return `${i && n < 100 ? n.toFixed(1) : Math.round(n)} ${units[i]}`;
}

function make(tag, name, text) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text != null) node.textContent = text;
  return node;
}

function cardOf(card) {
  const aside = make("aside", "card");
  aside.setAttribute("aria-label", "What this answer cost");
  const list = make("dl");
  const rows = [
    ["First token", seconds(card.ttft)],
    ["Tokens/s", rate(card.rate)],
    ["Cached", card.prompt == null ? "–" : `${card.cached} of ${card.prompt}`],
    ["K/V", bytes(card.kv)],
  ];
  for (const [name, value] of rows) list.append(make("dt", "", name), make("dd", "", value));
  aside.append(list);
  if (card.prompt != null) {
    const bar = make("div", "bar"), key = make("p", "key");
    const parts = [
      ["cached", card.cached, "cached"],
      ["fresh", card.prompt - card.cached, "computed"],
      ["made", card.made, "answer"],
    ];
    for (const [name, num, word] of parts) {
      const part = make("span", name);
      part.style.flexGrow = num;
      bar.append(part);
      key.append(make("span", name, `${num} ${word}`));
    }
    aside.append(bar, key);
  }
  return aside;
}

// -- the conversation --------------------------------------------------------------------------

function draw(turn) {
  const node = make("section", "turn");
  const said = make("div", "said"), answer = make("p", "answer", turn.answer);
  said.append(answer);
  if (turn.error) said.append(make("p", "error", turn.error));
  node.append(make("p", "mine", turn.question), said);
  if (turn.card) node.append(cardOf(turn.card));
  talk.append(node);
  return { node, answer };
}

function keep() {
  const system = $("system").value, temperature = $("temperature").value;
  const state = { messages, shown, system, temperature, maxTokens: $("max-tokens").value };
  try { sessionStorage.setItem(KEPT, JSON.stringify(state)); } catch { /* a full or closed store */ }
}

function recall() {
  let state = null;
  try { state = JSON.parse(sessionStorage.getItem(KEPT)); } catch { /* not ours */ }
  if (!state) return;
  ({ messages, shown } = state);
  $("system").value = state.system;
  $("temperature").value = state.temperature;
  $("max-tokens").value = state.maxTokens;
  shown.forEach(draw);
}

function clear() {
  running?.abort();
  messages = [];
  shown = [];
  for (const node of talk.querySelectorAll(".turn")) node.remove();
  keep();
  refresh();
  prompt.focus();
}

function refresh() {
  $("empty").hidden = talk.querySelector(".turn") !== null;
  send.hidden = running !== null;
  stop.hidden = running === null;
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

const nearEnd = () => talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80;
const toEnd = () => { talk.scrollTop = talk.scrollHeight; };

// -- asking ------------------------------------------------------------------------------------

async function* events(body, signal) {
  const reply = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!reply.ok) {
    const told = await reply.json().catch(() => null);
    throw new Error(told?.error?.message ?? `the server answered ${reply.status}`);
  }
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection ended before the answer did");
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function request() {
  const system = $("system").value.trim();
  const body = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
  if ($("max-tokens").value !== "") body.max_tokens = Number($("max-tokens").value);
  return body;
}

async function ask(question) {
  messages.push({ role: "user", content: question });
  const turn = { question, answer: "", error: null, card: null };
  const { node, answer } = draw(turn);
  answer.classList.add("waiting");
  running = new AbortController();
  const mine = running;
  refresh();
  toEnd();

  const began = performance.now();
  let first = null, pieces = 0;
  try {
    for await (const event of events(request(), mine.signal)) {
      const text = event.choices[0]?.delta?.content;
      if (text) {
        const follow = nearEnd();
        first ??= performance.now();
        pieces += 1;
        turn.answer += text;
        answer.append(text);
        answer.className = "answer streaming";
        if (follow) toEnd();
      }
      if (event.usage) {
        const { usage, stairs } = event;
        turn.card = {
          ttft: (first ?? performance.now()) / 1000 - began / 1000,
          rate: stairs.tokens_per_second,
          cached: usage.prompt_tokens_details.cached_tokens,
          prompt: usage.prompt_tokens,
          made: usage.completion_tokens,
          kv: stairs.kv_bytes_stored,
        };
      }
    }
  } catch (error) {
    if (error.name === "AbortError") {
      const rest = (performance.now() - first) / 1000;
      const known = first !== null;
      turn.card = {
        ttft: known ? (first - began) / 1000 : null,
        rate: known && pieces > 1 ? (pieces - 1) / rest : null,
      };
      turn.error = "Stopped.";
    } else {
      turn.error = error.message;
    }
  }
  if (running !== mine) return; // a new chat began meanwhile
  running = null;
  if (turn.answer) messages.push({ role: "assistant", content: turn.answer });
  else messages.pop();
  shown.push(turn);
  const follow = nearEnd();
  node.remove();
  draw(turn);
  keep();
  refresh();
  if (follow) toEnd();
  prompt.focus();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const question = prompt.value.trim();
  if (!question || running) return;
  prompt.value = "";
  ask(question);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});
prompt.addEventListener("input", refresh);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
stop.addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => { const old = running; running = null; old?.abort(); clear(); });
for (const id of ["system", "temperature", "max-tokens"]) $(id).addEventListener("change", keep);

for (const idea of IDEAS) {
  const button = make("button", "", idea);
  button.type = "button";
  button.addEventListener("click", () => { if (!running) ask(idea); });
  $("ideas").append(button);
}

// -- the server's state ------------------------------------------------------------------------

async function look() {
  try {
    const health = await (await fetch("/health")).json();
    $("state").textContent = health.status === "ready" ? "" : `${health.status} …`;
    if (health.status === "ready" && !$("model").textContent) {
      const models = await (await fetch("/v1/models")).json();
      $("model").textContent = models.data[0].id;
      document.title = `Stairs · ${models.data[0].id}`;
    }
  } catch {
    $("state").textContent = "the server does not answer";
  }
  setTimeout(look, $("state").textContent ? 1000 : 15000);
}

recall();
refresh();
toEnd();
look();
