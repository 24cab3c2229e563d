addEventListener('load', () => {const images = [...document.images];
    document.body.dataset.drawn = images.filter(each => each.complete && each.naturalWidth > 0).length;
    document.body.dataset.images = images.length;});
{const tables = [...document.querySelectorAll("table")];
    const table = tables.find(each => each.caption.textContent.startsWith("Speed-up"));
    const heads = [...table.tHead.rows[0].cells];
    const n = heads.findIndex(head => head.textContent === "T = 64k");
    const column = () => [...table.tBodies[0].rows].map(row => row.cells[n].dataset.value || "none").join(" ");
    for (const name of ["up", "down"]) {
        heads[n].querySelector("button").click();
        document.body.dataset[name] = heads[n].getAttribute("aria-sort") + " " + column();
    }}
{const acts = [...document.querySelectorAll("a, button, summary, .scroll")];
    document.body.dataset.acts = acts.length;
    document.body.dataset.focused = acts.filter(each => {
        const shut = each.closest("details:not([open])");
        sections.forEach(fold => { fold.open = true; });
        if (shut && each !== shut.querySelector("summary")) { shut.open = true; }
        each.focus();
        return document.activeElement === each;
    }).length;
    const links = [...document.querySelectorAll('a[href^="#"]')];
    document.body.dataset.dangling = links.filter(each => !document.getElementById(each.hash.slice(1))).length;}
