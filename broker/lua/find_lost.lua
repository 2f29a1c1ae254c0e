-- keys: tasks triggers open admitted ended events counts changes failing
-- undeclared: run
-- Gives up open tasks whose entry is gone and whose answer is not in flight: nothing else would end
-- them. An answer is sent and its entry deleted in one step, and so are a trigger and its task. So
-- a task is lost if it was seen without an entry, and every message sent before that has been read.
-- What was seen while it was a trigger, or had another entry, says nothing of an answer sent since.
-- ARGV: the trainers' group, the event's fields, where in `open` to begin, about how many tasks to
-- look at, and for each task that the previous search saw without an entry, a mark: the entry's id
-- (none: a trigger), '>', and the newest message id at that time. Returns how many tasks were lost,
-- where to go on ('0': that was the end), and the tasks without an entry now, each with its mark.
local group, event, cursor, most = unpack(ARGV, 1, 4)
local seen, now, lost = {}, {}, 0
for i = 5, #ARGV, 2 do seen[ARGV[i]] = ARGV[i + 1] end

local delivered = {} -- the newest entry delivered to a trainer, by stream
local function newest_delivered(stream)
  if not delivered[stream] then
    delivered[stream] = '0-0'
    local groups = redis.pcall('XINFO', 'GROUPS', stream)
    for _, flat in ipairs(groups.err and {} or groups) do
      local about = pairs_of(flat)
      if about.name == group then delivered[stream] = about['last-delivered-id'] end
    end
  end
  return delivered[stream]
end

local function is_gone(stream, entry)
  if not redis.call('XRANGE', stream, entry, entry)[1] then return true end
  if not is_up_to(entry, newest_delivered(stream)) then return false end
  return not redis.call('XPENDING', stream, group, entry, entry, 1)[1] -- only acknowledged
end

local bounds = {} -- the oldest and newest entry by stream, read once as entries may be large
local function bounds_of(stream)
  if not bounds[stream] then
    local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
    local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
    bounds[stream] = {first and first[1], last and last[1] or '0-0'}
  end
  return unpack(bounds[stream], 1, 2)
end

guard()
local page = redis.call('HSCAN', key.open, cursor, 'COUNT', most)
for task, trigger in pairs(pairs_of(page[2])) do
  local about = cmsgpack.unpack(trigger)
  local stream = about.entry and stream_of(about.owner)
  local gone = redis.call('HEXISTS', key.admitted, task) == 0 and (not stream or is_gone(stream, about.entry))
  local said = stream and prefix .. 'inbox:' .. about.site or key.triggers
  local first, last
  if gone then first, last = bounds_of(said) end
  local entry = (about.entry or '') .. '>'
  local mark = seen[task]
  mark = mark and mark:sub(1, #entry) == entry and mark:sub(#entry + 1)
  if gone and mark and (not first or not is_up_to(first, mark)) then
    if stream then redis.call('XDEL', stream, about.entry) end
    lost = lost + end_task(task, '', 'given_up', reasons.ENTRY_LOST, cmsgpack.unpack(event))
  elseif gone then
    now[#now + 1] = task
    now[#now + 1] = entry .. (mark or last)
  end
end
return {lost, page[1], now}
