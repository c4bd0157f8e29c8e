// A browser starts no Worker for a page that is opened from a folder, and the search is one. There a hidden frame runs
// its script instead; what both sides post becomes message events. Named so that the offline plugin adds no other.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.started = new Promise(resolve => {
        const script = inside.document.createElement("script")
        script.src = url
        script.onload = () => resolve(inside)
        inside.document.head.append(script)
      })
    }

    postMessage(data) {
      this.started.then(inside => inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
