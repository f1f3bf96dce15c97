// <rate-chart data-points="[[seconds], [in], [out]]" data-names="in,out" data-colors="--ready,--ok">: lines over time.
import uPlot from "./vendor/uPlot.js";

// A canvas cannot read var() or light-dark(): the browser resolves them on an element.
function resolved(name) {
  const probe = document.createElement("span");
  probe.hidden = true;
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

class RateChart extends HTMLElement {
  static observedAttributes = ["data-points"];
  #plot = null;
  #redraw = () => this.#draw();

  connectedCallback() {
    this.#draw();
    this.resize = new ResizeObserver(() => this.#plot?.setSize(this.#size()));
    this.resize.observe(this);
    document.addEventListener("theme", this.#redraw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.#redraw);
  }

  disconnectedCallback() {
    this.resize.disconnect();
    document.removeEventListener("theme", this.#redraw);
    matchMedia("(prefers-color-scheme: dark)").removeEventListener("change", this.#redraw);
    this.#plot?.destroy();
    this.#plot = null;
  }

  attributeChangedCallback() {
    this.#plot?.setData(JSON.parse(this.dataset.points));
  }

  #size() {
    return { width: this.clientWidth || 600, height: 180 };
  }

  #draw() {
    this.#plot?.destroy();
    const colors = this.dataset.colors.split(",");
    const lines = this.dataset.names.split(",").map((label, i) => ({
      label,
      stroke: resolved(colors[i]),
      width: 1.5,
      points: { show: false },
    }));
    const axis = {
      stroke: resolved("--muted"),
      grid: { stroke: resolved("--line"), width: 1 },
      ticks: { show: false },
      font: "11px Inter, system-ui",
    };
    const clock = (_, times) => times.map((at) => new Date(at * 1000).toISOString().slice(11, this.#isShort() ? 19 : 16));
    this.#plot = new uPlot(
      {
        ...this.#size(),
        padding: [8, 28, 0, 0], // on the right, half of the last time
        legend: { show: false },
        cursor: { y: false },
        scales: { y: { range: (_, low, high) => [0, Math.max(1, high * 1.15)] } },
        series: [{}, ...lines],
        axes: [{ ...axis, values: clock, space: 80, size: 28 }, { ...axis, size: 48 }],
      },
      JSON.parse(this.dataset.points),
      this,
    );
  }

  #isShort() {
    const times = JSON.parse(this.dataset.points)[0];
    return times.length > 1 && times.at(-1) - times[0] < 600;
  }
}

customElements.define("rate-chart", RateChart);
