// What JavaScript adds to the panels of the live page, each time one is drawn anew.

export function enhance() {}
