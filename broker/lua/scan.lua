-- keys:
-- Scans one step through Redis's keys. ARGV: the cursor, a pattern, and how many keys to look at.
-- Returns the next cursor and the names. Sites may write names of any length: keys with longer
-- names than any of ours are never read, so they are deleted and not returned.
local page, names = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3]), {}
for _, name in ipairs(page[2]) do
  if #name > 4096 then
    redis.call('PEXPIRE', name, 1)
  else
    names[#names + 1] = name
  end
end
return {page[1], names}
