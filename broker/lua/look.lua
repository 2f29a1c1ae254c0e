-- keys:
-- undeclared: run head open admitted queue triggers sites counts alive kept dead owners pool events models changes concurrent failing
-- Everything countable, and the ids of the newest event and version: the view includes all up to
-- them. ARGV[1]: 1 to count the inboxes as well. There is one per site, and the scheduler looks at
-- every version, so it leaves them out. ARGV[2]: which open tasks and owned devices are wanted:
-- 'none'; 'all'; or 'since', those that changed after the entry of `changes` with the id, field and
-- value in ARGV[3] to ARGV[5]. Failing devices are told with the owned ones; for 'none', some of them.
--
-- An entry that is still there as it was vouches for what came before it: Redis has not fallen back
-- behind it. So what follows it names all that is different now. Without it, all are wanted.
local MOST = 1000 -- changes told one by one

local function newest(stream)
  local entry = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', '1')[1]
  return entry and entry[1] or '0-0'
end
local said = ARGV[1] == '1' and 0
for _, site in ipairs(said and redis.call('SMEMBERS', key.sites) or {}) do
  said = said + redis.call('XLEN', prefix .. 'inbox:' .. site)
end

-- The changes since the caller's place; nil if that can't be told.
local function changes_since(id, field, value)
  local found = redis.call('XRANGE', key.changes, id, '+', 'COUNT', MOST + 2)
  local at = found[1]
  local is_place = at and at[1] == id and at[2][1] == field and at[2][2] == value
  return is_place and #found <= MOST + 1 and found or nil
end

-- Names and values in turn of the fields named; false if a field isn't there.
local function fields(hash, names)
  local values = #names > 0 and redis.call('HMGET', hash, unpack(names)) or {}
  local found = {}
  for i, name in ipairs(names) do
    found[2 * i - 1], found[2 * i] = name, values[i]
  end
  return found
end

local tasks, devices, failing = {'all'}, {'all'}, {}
local changes = ARGV[2] == 'since' and changes_since(ARGV[3], ARGV[4], ARGV[5])
if changes then
  local names, numbers, seen, all = {}, {}, {}, false
  for i = 2, #changes do
    local field, value = unpack(changes[i][2])
    if field == 't' and not seen[value] then
      seen[value], names[#names + 1] = true, value
    elseif value == '*' then
      all = true
    elseif field == 'd' then
      for number in string.gmatch(value, '%d+') do
        if not seen[number] then seen[number], numbers[#numbers + 1] = true, number end
      end
    end
  end
  all = all or #numbers > MOST
  tasks = {'some', fields(key.open, names)}
  if not all then
    devices = {'some', fields(key.owners, numbers)}
    failing = fields(key.failing, numbers)
  end
end
if ARGV[2] == 'none' then
  tasks, devices = {'none'}, {'none'}
  failing = redis.call('HSCAN', key.failing, 0, 'COUNT', MOST)[2]
end
if tasks[1] == 'all' then tasks[2] = redis.call('HVALS', key.open) end
if devices[1] == 'all' then
  devices[2] = redis.call('HKEYS', key.owners)
  failing = redis.call('HGETALL', key.failing)
end

local owned = redis.call('HLEN', key.owners)
local now = redis.call('TIME')
return {
  redis.call('HGETALL', key.run), redis.call('HGETALL', key.head), redis.call('HGETALL', key.counts),
  redis.call('HLEN', key.open), redis.call('HLEN', key.admitted), redis.call('XLEN', key.queue),
  redis.call('XLEN', key.triggers), said, redis.call('ZCOUNT', key.alive, '(0', '+inf'), workers(),
  redis.call('ZCARD', key.kept), redis.call('XLEN', key.dead), owned,
  owned > 0 and pool_serves() and 1 or 0,
  newest(key.events), newest(key.models), now[1] .. '.' .. string.format('%06d', now[2]),
  tasks, devices, failing, redis.call('XREVRANGE', key.changes, '+', '-', 'COUNT', '1')[1] or false,
}
