(() => {
  "use strict";
  const root = document.documentElement;
  const charts = [...document.querySelectorAll(".chart")];
  const drawn = new Set();

  // A probe resolves what a variable means under the present colours.
  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;
  const colour = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  const withColours = (key, value) => {
    if (typeof value !== "string" || !value.startsWith("--")) return value;
    if (key === "color") return colour(value);
    return key === "colorscale" ? [0, 1, 2, 3, 4].map((step) => [step / 4, colour(`${value}-${step}`)]) : value;
  };

  function commonLayout() {
    const axis = {
      gridcolor: colour("--rule"), zerolinecolor: colour("--rule"), linecolor: colour("--quiet"),
      automargin: true, title: { standoff: 10 },
    };
    return {
      font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", size: 13, color: colour("--ink") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 56, r: 12, t: 36, b: 48 },
      xaxis: axis, yaxis: axis,
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", itemsizing: "constant" },
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--quiet"), font: { color: colour("--ink") }, namelength: -1 },
      // On a touch screen a drag scrolls the page.
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    };
  }

  function draw(chart) {
    const spec = JSON.parse(chart.nextElementSibling.textContent, withColours);
    spec.layout.template = { layout: commonLayout() };
    drawn.add(chart);
    return Plotly.react(chart, spec.data, spec.layout, { responsive: true, displayModeBar: false });
  }
  const redraw = () => drawn.forEach(draw);

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "400px" });
  charts.forEach((chart) => watcher.observe(chart));

  const system = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const update = () => { button.setAttribute("aria-pressed", String(isDark())); redraw(); };
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; update(); });
  system.addEventListener("change", update);
  update();

  let before;
  addEventListener("beforeprint", () => { before = root.dataset.theme; root.dataset.theme = "light"; charts.forEach(draw); });
  addEventListener("afterprint", () => { if (before) root.dataset.theme = before; else delete root.dataset.theme; update(); });
})();
