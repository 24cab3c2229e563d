// Walks a site by its links: from the first page to each operation's, to the row behind a number, and back. What was
// seen goes from page to page in the window's name, and stands in the last page's body.
{const seen = JSON.parse(window.name || '{"pages": [], "wrong": []}');
    const here = location.pathname.split("/").pop();
    const folder = location.href.slice(0, location.href.lastIndexOf("/") + 1);
    const wrong = (what, holds) => holds && seen.wrong.push(`${here}: ${what}`);
    const links = [...document.querySelectorAll("a[href]")];
    const to = each => each.getAttribute("href");
    const sorts = table => {
        const head = [...table.tHead.rows[0].cells].find(each => each.textContent.includes("time (ms)"));
        head.querySelector("button").click();
        const times = [...table.tBodies[0].rows].map(row => Number(row.cells[head.cellIndex].dataset.value));
        return times.length > 0 && times.every((time, n) => !n || times[n - 1] <= time);
    };
    const follow = {
        index: () => links.find(each => !/-rows\.html|#/.test(to(each)) && !seen.pages.includes(to(each))),
        operation: () => {
            wrong("a table does not sort", ![...document.querySelectorAll("table")].every(sorts));
            const number = links.find(each => each.closest("td") && /-rows\.html#/.test(to(each)));
            seen.number = number.textContent;
            return number;
        },
        rows: () => {
            const cells = [...(document.querySelector("tr:target")?.cells ?? [])];
            wrong(`${location.hash} is no row with ${seen.number}`, !cells.some(each => each.textContent === seen.number));
            return links.find(each => to(each) === "index.html");
        },
    };
    addEventListener("load", () => {
        seen.pages.push(here);
        wrong("no style", getComputedStyle(document.body).marginTop !== "0px");
        wrong("a broken image", [...document.images].some(each => !each.naturalWidth));
        const loaded = performance.getEntriesByType("resource").map(each => each.name);
        wrong(`loads ${loaded}`, !loaded.every(name => name.startsWith(folder) || name.startsWith("data:")));
        const next = follow[here === "index.html" ? "index" : here.endsWith("-rows.html") ? "rows" : "operation"]();
        window.name = JSON.stringify(seen);
        if (next) {
            next.click();
        } else {
            document.body.dataset.pages = seen.pages.join(" ");
            document.body.dataset.wrong = seen.wrong.join("; ");
        }
    });}
