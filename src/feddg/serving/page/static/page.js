"use strict";
// Each image is a request of its own, a few at a time: answers appear as they come.
const AT_ONCE = 4;
const drop = document.getElementById("drop");
const input = document.getElementById("files");
const results = document.getElementById("results");
const state = document.getElementById("state");
const limit = Number(document.body.dataset.limit);
const queue = [];
let working = 0, done = 0, total = 0;

const percent = (share) => `${(100 * share).toFixed(1)} %`;

function element(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

function picture(file) {
  const image = element("img");
  image.alt = "";
  image.src = URL.createObjectURL(file);
  image.onload = () => URL.revokeObjectURL(image.src);
  image.onerror = () => {
    URL.revokeObjectURL(image.src);
    image.replaceWith(element("span", "blank", "no preview in this browser"));
  };
  return image;
}

function add(file) {
  const item = element("li");
  const text = element("div");
  text.append(element("p", "name", file.name), element("p", "label", "…"));
  item.append(picture(file), text);
  results.append(item);
  queue.push({ file, text });
  total += 1;
}

function show(text, answer) {
  text.replaceChildren(element("p", "name", answer.name));
  if (answer.reason) {
    text.append(element("p", "fault", `Cannot be used: ${answer.reason}.`));
    return;
  }
  const label = element("p", "label", `${answer.label} `);
  label.append(element("span", "share", percent(answer.confidence)));
  const bar = element("meter");
  bar.value = answer.confidence;
  bar.setAttribute("aria-label", `confidence ${percent(answer.confidence)}`);
  const ranked = Object.entries(answer.probabilities).sort((a, b) => b[1] - a[1]);
  const others = ranked.slice(1, 3).filter(([, share]) => share >= 0.005).map(([name, share]) => `${name} ${percent(share)}`).join(", ");
  text.append(label, bar);
  if (others) text.append(element("p", "others", `then ${others}`));
  if (answer.unlike_training === true) {
    text.append(element("p", "light on", "unlike the training images: look for yourself"));
  } else if (answer.unlike_training === false) {
    text.append(element("p", "light", "like the training images"));
  }
}

async function ask({ file, text }) {
  const fault = (reason) => show(text, { name: file.name, reason });
  if (file.size > limit - 4096) {
    fault("the file is larger than this server takes");
    return;
  }
  const form = new FormData();
  form.append("images", file);
  try {
    const reply = await fetch("predict", { method: "POST", body: form });
    const answer = await reply.json();
    if (answer.images) show(text, answer.images[0]);
    else fault(answer.detail || `the server answered ${reply.status}`);
  } catch {
    fault("the server does not answer");
  }
}

async function work() {
  if (working >= AT_ONCE || queue.length === 0) return;
  working += 1;
  await ask(queue.shift());
  working -= 1;
  done += 1;
  state.textContent = done < total ? `${done} of ${total} images answered` : `${total} answered`;
  work();
}

function take(files) {
  for (const file of files) add(file);
  if (files.length) state.textContent = `${done} of ${total} images answered`;
  for (let i = 0; i < AT_ONCE; i += 1) work();
}

input.addEventListener("change", () => { take([...input.files]); input.value = ""; });
for (const kind of ["dragenter", "dragover"]) {
  drop.addEventListener(kind, (event) => { event.preventDefault(); drop.classList.add("over"); });
}
for (const kind of ["dragleave", "drop"]) {
  drop.addEventListener(kind, (event) => { event.preventDefault(); drop.classList.remove("over"); });
}
drop.addEventListener("drop", (event) => take([...event.dataTransfer.files]));
// A file dropped beside the frame must not replace the page.
for (const kind of ["dragover", "drop"]) {
  window.addEventListener(kind, (event) => event.preventDefault());
}
