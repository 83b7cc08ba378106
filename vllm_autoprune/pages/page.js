
"use strict";
const tip = document.getElementById("tip");
const hide = () => { tip.hidden = true; document.querySelectorAll(".near").forEach(mark => mark.classList.remove("near")); };
document.querySelectorAll("figure.chart").forEach(figure => {
  const plot = figure.querySelector("svg.plot");
  const marks = [...plot.querySelectorAll(".mark")];
  const texts = new Map(marks.map(mark => {
    const title = mark.querySelector("title");
    title.remove();
    mark.setAttribute("aria-label", title.textContent);
    return [mark, title.textContent];
  }));
  const show = event => {
    const box = plot.getBoundingClientRect(), scale = plot.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const apart = mark => Math.hypot(mark.dataset.x - x, mark.dataset.y - y);
    const shown = marks.filter(mark => !mark.closest(".off"));
    const near = shown.reduce((best, mark) => !best || apart(mark) < apart(best) ? mark : best, null);
    hide();
    if (!near || apart(near) > 40) return;
    near.classList.add("near");
    tip.textContent = texts.get(near);
    tip.hidden = false;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const above = event.clientY - tip.offsetHeight - 12;
    tip.style.left = Math.max(left, 8) + "px";
    tip.style.top = (above > 8 ? above : event.clientY + 18) + "px";
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", event => event.pointerType === "mouse" && hide());
  figure.querySelectorAll(".legend button").forEach(button => button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", on);
    plot.querySelector(`g[data-series="${button.dataset.series}"]`).classList.toggle("off", !on);
  }));
});
// A finger leaves the chart when it is lifted: what it tapped stays until the next tap or scroll.
addEventListener("pointerdown", event => event.target.closest(".plot") || hide());
addEventListener("scroll", hide, {passive: true});
const open = () => {
  const entry = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let node = entry; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
  if (entry) entry.scrollIntoView();
};
addEventListener("hashchange", open);
open();
