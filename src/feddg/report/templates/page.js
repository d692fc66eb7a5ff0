"use strict";
(() => {
  const read = (id) => document.getElementById(id).textContent;
  const touch = matchMedia("(pointer: coarse)").matches;
  const title = { font: { size: 13 } };
  const axis = { automargin: true, zeroline: false, ticks: "", title };
  const template = {
    layout: {
      font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", size: 13, color: "#3d4852" },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 8, r: 8, t: 8, b: 8 },
      hoverlabel: { bgcolor: "#ffffff", bordercolor: "#cfd6dc", align: "left" },
      legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", xref: "container", x: 0 },
      xaxis: { ...axis, gridcolor: "#eef1f4" },
      yaxis: { ...axis, gridcolor: "#e3e8ec", ticklabelstandoff: 6 },
    },
  };
  const settings = { responsive: true, displayModeBar: false, showTips: false };

  async function unpack() {
    const bytes = Uint8Array.from(atob(read("plotly")), (letter) => letter.charCodeAt(0));
    const gzip = new DecompressionStream("gzip");
    return new Response(new Blob([bytes]).stream().pipeThrough(gzip)).text();
  }

  async function load() {
    const script = document.createElement("script");
    script.textContent = await unpack();
    document.head.append(script);
  }

  async function draw(chart) {
    const canvas = chart.querySelector(".canvas");
    if (canvas.dataset.state || !canvas.offsetParent) return;
    canvas.dataset.state = "drawing";
    const { data, layout } = JSON.parse(chart.querySelector("script").textContent);
    Object.assign(layout, { template, dragmode: touch ? false : "zoom" });
    await Plotly.newPlot(canvas, data, layout, settings);
    canvas.dataset.state = "drawn";
  }

  const drawn = () => [...document.querySelectorAll(".canvas[data-state=drawn]")];
  const drawVisible = () => Promise.all([...document.querySelectorAll(".chart")].map(draw));

  function unavailable() {
    for (const canvas of document.querySelectorAll(".canvas")) {
      canvas.style.height = "auto";
      canvas.innerHTML = '<span class="unavailable">This chart needs a browser from 2023 or later. The tables on this page are complete.</span>';
    }
  }

  // A link to a folded section opens it.
  function unfold() {
    const folded = document.getElementById(location.hash.slice(1))?.querySelector(":scope > details");
    if (folded) folded.open = true;
  }

  // Paper is narrower than most windows: draw for it, and go back to the window afterwards.
  function fitPaper() {
    for (const canvas of drawn()) {
      Plotly.relayout(canvas, { width: 660, height: canvas.clientHeight });
    }
  }
  function fitWindow() {
    for (const canvas of drawn()) Plotly.relayout(canvas, { width: null, height: null, autosize: true });
  }

  async function start() {
    addEventListener("hashchange", unfold);
    unfold();
    if (!("DecompressionStream" in window)) return unavailable();
    await load();
    await drawVisible();
    document.addEventListener("toggle", drawVisible, true);
    addEventListener("beforeprint", fitPaper);
    addEventListener("afterprint", fitWindow);
    document.documentElement.dataset.charts = "drawn";
  }
  start();
})();
