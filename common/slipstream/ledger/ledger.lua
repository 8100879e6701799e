-- The book of a run. Every transition of a ticket, a member, a step or an evaluation is one function of this
-- library, so it happens whole or not at all, and the counters change in the same instant as the records.
--
-- The client puts two lines in front: the library's name and RELEASE, the digest of this text, which also
-- begins every function's name. Two releases can therefore serve their own processes on one server.
--
-- A refusal must come before the first write of a function: the server does not undo writes.
-- (Returning what has expired is a transition of its own and may precede a refusal.)
--
-- Keys, all behind `slipstream:{RUN}:`, hence in one slot:
--   run         hash  terms, tickets issued (next), version, step, status
--   t:N         hash  record of ticket N, from its first admission until it is folded
--   records     zset  numbers of the tickets that have a record
--   counts      hash  groups:LABEL, tokens:LABEL; LABEL is a state, with its reason once dropped or failed
--                     uses (groups times the steps that trained on them), bytes (what lies in buffers), lost,
--                     partial_bytes (what lies in `partials`), unscored/REASON (samples ever left without a
--                     reward, of all groups that were scored: those that never reach a step as well)
--   retry       zset  issued tickets that wait for another attempt, by the time they may start
--   flight      zset  rolling and scored tickets, by the version they were admitted at
--   deadlines   zset  rolling and scored tickets, by deadline
--   partials    hash  unfinished groups by ticket, handed over by replicas that could not finish them
--   step:S      set   tickets taken or trained in step S;  steps: zset of such S
--   closed      list  dropped and failed tickets that are not folded yet, oldest first
--   bits:LABEL  str   bitmap of the folded tickets of that outcome: one bit a ticket, however scattered
--   folded      hash  groups:LABEL, tokens:LABEL of what the bitmaps hold
--   folds       list  the newest folds, so that buffers can delete rows
--   alive       zset  live members by expiry;  m:ID hash, owned:ID set of tickets, granted:ID list
--   shards      hash  the member that holds each buffer shard; nobody else is believed to be it
--   retired     zset  incarnations that were replaced and may not come back
--   evals       zset  evaluations in order;  e:JOB hash, e:JOB:back set, e:JOB:claims and e:JOB:results hash,
--                     items:ID set of what a member has claimed
--   made        hash  learner that committed each step, from the durable one on
--   manifest    hash  newest announced version and its manifest
--   lost        list  versions that a learner's restart took out of the line of descent
--   changed     list  terms that a resume changed
--   asked       str   what a person wants of the learner: checkpoint or drain
--   unwanted    set   taken tickets that a person wants dropped
--   clock       hash  newest time that a call saw (seen), and what the server's clock lacks of it (shift)

local KEEP_CLOSED = 1024      -- dropped or failed records kept, so that a repeated call gets its answer
local FOLD_BATCH = 256        -- of them folded at once, so that one drop in 256 pays for it
local KEEP_FOLDS = 64         -- folds listed one by one; a buffer that is further behind reads the bitmaps
local KEEP_RETIRED = 10000
local EXPIRE_BATCH = 1000     -- bounds the time of one call
local BACKOFF_MS = 1000
local RESERVED_MS = 5000      -- time that a replica has to take what was handed over to it by name
local SEEN_MS = 100           -- how exactly the newest time is written down: not with every call
local RESERVED_SCAN = 256     -- such tickets looked past in one call

local FIXED = {'run_id', 'dataset_fingerprint', 'prompts', 'seed'}
local FIXED_NAMES = {run_id = 'run.name', prompts = 'the number of prompts of data', seed = 'run.seed'}
local NUMERIC = {
  attempt = true, tries = true, admitted = true, deadline = true, oldest = true, newest = true, tokens = true,
  informative = true, step = true, next = true, version = true, durable_step = true, max_staleness = true,
  cap = true, max_attempts = true, end_ticket = true, ticket_deadline_ms = true, attempt_base = true,
  changes = true, folds = true, grant = true, eval_grant = true, ttl_ms = true, items = true,
  min_version = true, pinned = true, has_committed = true, uses = true, bytes = true, reuse = true,
  max_bytes = true, groups_per_step = true, largest = true, partial = true,
}

-- Of the call being served; the server serves one call at a time.
local prefix, now

local function key(name) return prefix .. name end

local function refuse(code, message) error({code = code, message = message}) end

-- What the call has changed in `counts`, and how often the book: written at once, at its end or before it is read.
local sums, touched = {}, 0

local function add(field, by) sums[field] = (sums[field] or 0) + by end

local function settle()
  for field, by in pairs(sums) do
    if by ~= 0 then redis.call('HINCRBY', key('counts'), field, by) end
  end
  if touched > 0 then redis.call('HINCRBY', key('run'), 'changes', touched) end
  sums, touched = {}, 0
end

-- Of `counts`, as numbers.
local function counted(...)
  settle()
  local found = redis.call('HMGET', key('counts'), ...)
  for i = 1, #found do found[i] = tonumber(found[i]) or 0 end
  return unpack(found)
end

local READS = {'no-writes'}
local WRITES = {'allow-oom'}   -- what frees memory or finishes work goes on when the server is full
local GROWS = {}               -- what brings more work is refused then

-- Time that never goes back: once the server's clock was set back, what it lacks is added, so that time goes on from
-- where it was. Standing still until the clock has caught up would stretch every lease just as going back would.
local function tell_time(time, flags)
  local found = redis.call('HMGET', key('clock'), 'seen', 'shift')
  local seen, shift = tonumber(found[1]) or 0, tonumber(found[2]) or 0
  time = time + shift
  local ahead = time - seen
  if ahead < 0 then time, shift = seen, shift - ahead end
  if flags ~= READS and (ahead < 0 or ahead >= SEEN_MS) then
    redis.call('HSET', key('clock'), 'seen', time, 'shift', shift)
  end
  return time
end

local function define(name, flags, body)
  redis.register_function{
    function_name = RELEASE .. '_' .. name,
    flags = flags,
    callback = function(keys, args)
      prefix, sums, touched = keys[1], {}, 0
      now = tonumber(args[1])
      if not now then
        local time = redis.call('TIME')
        now = time[1] * 1000 + math.floor(time[2] / 1000)
      end
      now = tell_time(now, flags)
      local values = cmsgpack.unpack(args[2])
      for i = 3, #args do values[#values + 1] = args[i] end
      local ok, reply, blobs = pcall(body, unpack(values))
      settle()   -- also after a refusal: what had expired was returned before it
      if ok then return {'OK', cmsgpack.pack(reply), unpack(blobs or {})} end
      if type(reply) == 'table' and reply.code then return {reply.code, reply.message} end
      error(reply)
    end,
  }
end

local function hash(name)
  local flat = redis.call('HGETALL', key(name))
  if #flat == 0 then return nil end
  local fields = {}
  for i = 1, #flat, 2 do
    fields[flat[i]] = NUMERIC[flat[i]] and tonumber(flat[i + 1]) or flat[i + 1]
  end
  return fields
end

local function numbers(command, ...)
  local found = redis.call(command, ...)
  for i = 1, #found do found[i] = tonumber(found[i]) end
  return found
end

local function sorted_members(name)
  local found = numbers('SMEMBERS', key(name))
  table.sort(found)
  return found
end

local function opened()
  return hash('run') or refuse('NOTOPEN', 'the run is not open in this ledger')
end

-- Some of the run's numbers, for what is done once a ticket: the whole hash costs ten times as much.
local function of_run(...)
  local found = redis.call('HMGET', key('run'), ...)
  if not found[1] then opened() end
  for i = 1, #found do found[i] = tonumber(found[i]) or 0 end
  return unpack(found)
end

---------------------------------------------------------------------------------------------------- records

local FIELDS = {
  'state', 'attempt', 'tries', 'owner', 'admitted', 'deadline', 'oldest', 'newest', 'tokens', 'informative', 'shard',
  'step', 'reason', 'answered', 'uses', 'bytes', 'partial', 'to',
}

-- `was` holds what the server has, so that only what differs is written.
local function read(number)
  local found = redis.call('HMGET', key('t:' .. number), unpack(FIELDS))
  if not found[1] then return nil end
  local record = {number = number, was = found}
  for i, field in ipairs(FIELDS) do
    if NUMERIC[field] then found[i] = tonumber(found[i]) end
    record[field] = found[i] or (NUMERIC[field] and 0 or '')
  end
  return record
end

local function label_of(record)
  if record.reason ~= '' then return record.state .. ':' .. record.reason end
  return record.state
end

local LIES = {buffered = true, taken = true}   -- what fills a buffer and is not trained to its end

local function count(record, sign)
  local label = label_of(record)
  if LIES[record.state] then add('bytes', sign * record.bytes) end
  add('groups:' .. label, sign)
  add('tokens:' .. label, sign * record.tokens)
  touched = touched + 1
end

local function write(record)
  local flat, was = {}, record.was or {}
  for i, field in ipairs(FIELDS) do
    if record[field] ~= was[i] then
      flat[#flat + 1] = field
      flat[#flat + 1] = record[field]
      was[i] = record[field]
    end
  end
  if #flat > 0 then redis.call('HSET', key('t:' .. record.number), unpack(flat)) end
end

-- The one way a record changes its state: counters and record together.
local function move(record, state, changes)
  count(record, -1)
  record.state = state
  for field, value in pairs(changes or {}) do record[field] = value end
  count(record, 1)
  write(record)
end

local function create(number, run)
  local record = {
    number = number, state = 'issued', attempt = run.attempt_base, tries = 0, owner = '', admitted = 0,
    deadline = 0, oldest = 0, newest = 0, tokens = 0, informative = 0, shard = '', step = 0, reason = '',
    answered = '', uses = 0, bytes = 0, partial = 0, to = '',
  }
  redis.call('ZADD', key('records'), number, number)
  count(record, 1)
  return record
end

local function was_issued(number) return number < opened().next end

local function known(number)
  local record = read(number)
  if record then return record end
  if not was_issued(number) then refuse('FENCED', 'ticket ' .. number .. ' was never issued') end
  refuse('FENCED', 'ticket ' .. number .. ' is closed for good')
end

-- The record of a ticket, if this attempt still holds it.
local function held(number, attempt)
  local record = known(number)
  if record.attempt ~= attempt then
    refuse('FENCED', string.format('ticket %d is at attempt %d, not %d', number, record.attempt, attempt))
  end
  return record
end

-- As `held`, for what only the member that rolls the ticket may say of it. A stored group keeps its owner's name.
local function owned(number, attempt, owner)
  local record = held(number, attempt)
  if record.owner ~= '' and record.owner ~= owner then
    refuse('FENCED', string.format('ticket %d attempt %d is of %s, not of %s', number, attempt, record.owner,
      owner == '' and 'nobody' or owner))
  end
  return record
end

-- Fewer tokens than before: an attempt's report leaves some out, such as those of a sample that is refused.
local function note_tokens(record, tokens)
  local more = tokens - record.tokens
  if more > 0 then add('tokens_in', more) else add('tokens_discarded', -more) end
end

-- As `note_tokens`, for a record that keeps its state.
local function set_tokens(record, tokens)
  note_tokens(record, tokens)
  count(record, -1)
  record.tokens = tokens
  count(record, 1)
end

-- The caller writes the record.
local function forget_partial(record)
  if record.partial == 0 then return end
  local size = redis.call('HSTRLEN', key('partials'), record.number)
  add('partial_bytes', -size)
  redis.call('HDEL', key('partials'), record.number)
  record.partial = 0
end

local function leave_flight(record)
  redis.call('ZREM', key('flight'), record.number)
  redis.call('ZREM', key('deadlines'), record.number)
  redis.call('SREM', key('owned:' .. record.owner), record.number)
end

-- A folded ticket keeps one bit: its outcome. The record goes.
local function fold(tickets)
  if #tickets == 0 then return end
  local more = {}
  for _, number in ipairs(tickets) do
    local record = read(number)
    local label = label_of(record)
    redis.call('SETBIT', key('bits:' .. label), number, 1)
    local groups, tokens = 'groups:' .. label, 'tokens:' .. label
    more[groups], more[tokens] = (more[groups] or 0) + 1, (more[tokens] or 0) + record.tokens
    more.uses = (more.uses or 0) + record.uses
    redis.call('DEL', key('t:' .. number))
    redis.call('ZREM', key('records'), number)
  end
  for field, by in pairs(more) do redis.call('HINCRBY', key('folded'), field, by) end
  redis.call('RPUSH', key('folds'), cmsgpack.pack(tickets))
  redis.call('LTRIM', key('folds'), -KEEP_FOLDS, -1)
  redis.call('HINCRBY', key('run'), 'folds', 1)
  touched = touched + 1
end

local function folded_labels()
  local labels = {}
  for _, field in ipairs(redis.call('HKEYS', key('folded'))) do
    local label = string.match(field, '^groups:(.*)$')
    if label then labels[#labels + 1] = label end
  end
  return labels
end

local function close(record, state, reason)
  leave_flight(record)
  forget_partial(record)
  move(record, state, {reason = reason, owner = ''})
  if redis.call('RPUSH', key('closed'), record.number) > KEEP_CLOSED then
    fold(numbers('LPOP', key('closed'), FOLD_BATCH))
  end
end

-- Whether a person wants a ticket out; asking takes the wish back.
local function is_unwanted(record) return redis.call('SREM', key('unwanted'), record.number) == 1 end

-- Back to the retry queue under a new attempt. `blamed`: the attempt counts against the ticket's limit. What was
-- handed over stays for the next attempt, unless an attempt failed that may have failed because of it.
local function reissue(record, run, reason, wait_ms, blamed, to)
  if blamed and record.tries + 1 >= run.max_attempts then return close(record, 'failed', reason) end
  leave_flight(record)
  if blamed and reason ~= 'lease_lost' then forget_partial(record) end
  add('tokens_discarded', record.tokens - record.partial)
  move(record, 'issued', {
    attempt = record.attempt + 1, tries = record.tries + (blamed and 1 or 0), owner = '', tokens = record.partial,
    oldest = 0, newest = 0, informative = 0, shard = '', bytes = 0, to = to or '',
  })
  redis.call('ZADD', key('retry'), now + wait_ms, record.number)
end

---------------------------------------------------------------------------------------------------- members

local function return_items(id)
  for _, item in ipairs(redis.call('SMEMBERS', key('items:' .. id))) do
    local job, index = string.match(item, '^(.*):(%d+)$')
    if redis.call('HGET', key('e:' .. job .. ':claims'), index) == id then
      redis.call('HDEL', key('e:' .. job .. ':claims'), index)
      redis.call('SADD', key('e:' .. job .. ':back'), index)
    end
  end
end

local function return_tickets(id, blamed)
  local tickets = sorted_members('owned:' .. id)
  if #tickets == 0 then return end
  local run = opened()
  for _, number in ipairs(tickets) do reissue(read(number), run, 'lease_lost', 0, blamed) end
end

-- `blamed` is false for a member that left in order: its tickets are not at fault.
local function dismiss(id, blamed)
  return_tickets(id, blamed)
  return_items(id)
  local shard = redis.call('HGET', key('m:' .. id), 'shard') or ''
  if redis.call('HGET', key('shards'), shard) == id then redis.call('HDEL', key('shards'), shard) end
  redis.call('DEL', key('m:' .. id), key('owned:' .. id), key('granted:' .. id), key('items:' .. id))
  redis.call('ZREM', key('alive'), id)
end

local function expire()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('alive'), '-inf', now, 'LIMIT', 0, EXPIRE_BATCH)) do
    dismiss(id, true)
  end
  local late = numbers('ZRANGEBYSCORE', key('deadlines'), '-inf', now, 'LIMIT', 0, EXPIRE_BATCH)
  if #late == 0 then return end
  local run = opened()
  for _, number in ipairs(late) do reissue(read(number), run, 'deadline', 0, true) end
end

local function retire(who, incarnation)
  redis.call('ZADD', key('retired'), now, who .. '\n' .. incarnation)
  redis.call('ZREMRANGEBYRANK', key('retired'), 0, -KEEP_RETIRED - 1)
end

local function refuse_retired(who, incarnation)
  if redis.call('ZSCORE', key('retired'), who .. '\n' .. incarnation) then
    refuse('FENCED', who .. ' ' .. incarnation .. ' was replaced by a newer process')
  end
end

local function live_member(id, incarnation)
  local member = hash('m:' .. id)
  if not member then
    refuse_retired(id, incarnation)
    refuse('EXPIRED', 'member ' .. id .. ' is not joined, or its lease ran out; join again')
  end
  if member.incarnation ~= incarnation then
    refuse('FENCED', id .. ' ' .. incarnation .. ' was replaced by ' .. member.incarnation)
  end
  return member
end

local function serve(id, member, version)
  if member.version ~= version then redis.call('HSET', key('m:' .. id), 'version', version) end
end

-- `shard` is the buffer shard that the member holds ('': none): one member holds it at a time.
define('join', WRITES, function(id, incarnation, ttl_ms, shard, fields)
  refuse_retired(id, incarnation)
  expire()
  local holder = redis.call('HGET', key('shards'), shard)
  if holder and holder ~= id then
    refuse('LEDGER', string.format('%s holds buffer shard %s; end it, or wait until its lease is over', holder, shard))
  end
  local before = hash('m:' .. id)
  if before and before.incarnation ~= incarnation then
    retire(id, before.incarnation)
    dismiss(id, true)
    before = nil
  end
  redis.call('HSET', key('m:' .. id), 'incarnation', incarnation, 'ttl_ms', ttl_ms, 'shard', shard, unpack(fields))
  if shard ~= '' then redis.call('HSET', key('shards'), shard, id) end
  if not before then
    redis.call('HSET', key('m:' .. id), 'version', -1, 'detail', '{}', 'grant', 0, 'eval_grant', 0)
  end
  redis.call('ZADD', key('alive'), now + ttl_ms, id)
end)

define('heartbeat', WRITES, function(id, incarnation, version, detail)
  expire()
  local member = live_member(id, incarnation)
  redis.call('ZADD', key('alive'), now + member.ttl_ms, id)
  if version >= 0 then serve(id, member, version) end
  if detail ~= '' then redis.call('HSET', key('m:' .. id), 'detail', detail) end
end)

define('leave', WRITES, function(id, incarnation)
  local member = hash('m:' .. id)
  if member and member.incarnation == incarnation then dismiss(id, false) end
end)

local function dismiss_all()
  for _, id in ipairs(redis.call('ZRANGE', key('alive'), 0, -1)) do dismiss(id, false) end
end

define('expire', WRITES, function() expire() end)

-- The id and the fields of each, packed one by one: one that announces nonsense must not spoil the others.
define('members', READS, function()
  local found = {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('alive'), '(' .. now, '+inf')) do
    found[#found + 1] = id
    found[#found + 1] = cmsgpack.pack(redis.call('HGETALL', key('m:' .. id)))
  end
  return nil, found
end)

---------------------------------------------------------------------------------------------------- the run

local function run_reply()
  return {
    redis.call('HGETALL', key('run')),
    redis.call('LRANGE', key('lost'), 0, -1),
    redis.call('LRANGE', key('changed'), 0, -1),
  }
end

define('state', READS, function()
  opened()
  return run_reply()
end)

define('open_run', WRITES, function(terms, expect_version)
  local wanted = {}
  for i = 1, #terms, 2 do wanted[terms[i]] = terms[i + 1] end
  if redis.call('EXISTS', key('ahead')) == 1 then   -- where `next` does not say which tickets were issued
    refuse('USER', 'an older release issued tickets of this run out of turn: go on with it, or begin another run.name')
  end
  local run = hash('run')
  if not run then
    if expect_version > 0 then
      refuse('LOST', 'the ledger is empty but the run was at version ' .. expect_version)
    end
    redis.call('HSET', key('run'), 'next', 0, 'version', 0, 'step', 0, 'durable_step', 0, 'status', 'running',
      'finish_reason', '', 'learner', '', 'attempt_base', 0, 'changes', 0, 'folds', 0, 'has_committed', 0, 'failures_in_row', 0,
      'last_failure', '', 'restored', '', unpack(terms))
    return run_reply()
  end
  if run.version < expect_version then
    refuse('LOST', 'the ledger is at version ' .. run.version .. ', older than version ' .. expect_version)
  end
  local differ = {}
  for _, name in ipairs(FIXED) do
    if tostring(run[name]) ~= wanted[name] then
      local told = name == 'dataset_fingerprint' and 'the rows of data are other ones here than in the ledger'
      differ[#differ + 1] = told or (FIXED_NAMES[name] .. ' is ' .. run[name] .. ' in the ledger and ' .. wanted[name] .. ' here')
    end
  end
  if #differ > 0 then refuse('USER', table.concat(differ, '; ')) end
  for name, value in pairs(wanted) do
    if tostring(run[name]) ~= value then
      redis.call('RPUSH', key('changed'),
        string.format('%s: %s to %s at step %d', name, tostring(run[name]), value, run.step))
      redis.call('LTRIM', key('changed'), -100, -1)
      redis.call('HSET', key('run'), name, value)
      -- members of the former build learn of it when they want to join again
      if name == 'release' then dismiss_all() end
    end
  end
  return run_reply()
end)

define('set_status', WRITES, function(status, reason)
  local run = opened()
  if run.status == 'finished' and status ~= 'running' then return {run.status, run.finish_reason} end
  redis.call('HSET', key('run'), 'status', status, 'finish_reason', reason)
  return {status, reason}
end)

-- A wish is not part of the book: it goes into no snapshot and bends no counter.
define('ask', WRITES, function(what)
  opened()
  if what == '' then redis.call('DEL', key('asked')) else redis.call('SET', key('asked'), what) end
end)

define('asked', READS, function() return redis.call('GET', key('asked')) or '' end)

-- The wish was taken up; another that was made meanwhile stays.
define('fulfilled', WRITES, function(what)
  if redis.call('GET', key('asked')) == what then redis.call('DEL', key('asked')) end
end)

---------------------------------------------------------------------------------------------------- tickets

-- Open groups on their way to a buffer, and those that lie in one.
local function open_groups()
  local issued, rolling, scored, buffered, taken = counted('groups:issued', 'groups:rolling', 'groups:scored',
    'groups:buffered', 'groups:taken')
  return issued + rolling + scored, buffered + taken
end

-- Versions that a learner's restart took out of the line of descent, as {first, last}.
local function lost_versions()
  local lost = redis.call('LRANGE', key('lost'), 0, -1)
  for i, range in ipairs(lost) do
    local first, last = string.match(range, '^(%d+)-(%d+)$')
    lost[i] = {tonumber(first), tonumber(last)}
  end
  return lost
end

-- Updates between the weights of two versions, low <= high; the twin of slipstream.staleness.age.
local function updates(low, high, lost)
  for i = #lost, 1, -1 do
    local kept, republished = lost[i][1] - 1, lost[i][2] + 1
    if low < republished and republished <= high then
      return high - republished + updates(math.min(low, kept), math.max(low, kept), lost)
    end
  end
  return high - low
end

-- Groups that may still start within the bound on stored bytes, taking those on their way for as large as the
-- largest one so far. The batch of one step may always be open, whatever its size, or nothing would go on.
local function room_in_bytes(run, open)
  local most, largest = run.max_bytes or 0, run.largest or 0
  if most == 0 then return run.cap end
  local least = run.groups_per_step - open
  if largest == 0 then return least end
  local stored = counted('bytes')
  local coming = redis.call('ZCARD', key('retry')) + redis.call('ZCARD', key('flight'))
  return math.max(least, math.floor((most - stored) / largest) - coming)
end

-- Groups that may start at this lag without a group passing the bound while it waits for its step: with those
-- open before it, it must find a place in one of the next (bound + 1 - lag) batches. What over-sampling adds is
-- for groups on their way, of which some will be lost; one that is stored is there. At lag 0 a whole batch may
-- always be open.
local function room_by_age(run, lag, flying, stored)
  local places = (run.max_staleness + 1 - lag) * run.groups_per_step / (run.reuse or 1)
  local wide = run.oversampling * (places - stored)
  local room = ((run.reuse or 1) == 1 and math.ceil(wide - 1e-6) or math.floor(wide + 1e-6)) - flying
  return lag == 0 and math.max(room, run.groups_per_step - stored - flying) or room
end

local function ticket_reply(record)
  return {record.number, record.attempt, record.admitted, record.deadline, record.partial}
end

-- A reply that got lost (the caller was cancelled, the connection broke) is given again.
local function regrant(id, given)
  for _, number in ipairs(numbers('LRANGE', key('granted:' .. id), 0, -1)) do
    local record = read(number)
    if record and record.state == 'rolling' and record.owner == id then given[#given + 1] = ticket_reply(record) end
  end
end

-- A group that goes on from what was handed over is as old as that. Under a policy by which no group may pass
-- the bound, it begins anew once it has.
local function age_with_partial(record, served, run)
  if record.partial == 0 then return served end
  local lost = lost_versions()
  local age = updates(record.admitted, run.version, lost)
  if age > run.max_staleness and (run.policy == 'drop' or run.policy == 'wait') then
    forget_partial(record)
    set_tokens(record, 0)
    return served
  end
  return age > updates(served, run.version, lost) and record.admitted or served
end

local function start_rolling(record, id, served, run)
  served = age_with_partial(record, served, run)
  if record.was then redis.call('ZREM', key('retry'), record.number) end   -- else it was issued just now
  redis.call('ZADD', key('flight'), served, record.number)
  redis.call('ZADD', key('deadlines'), now + run.ticket_deadline_ms, record.number)
  redis.call('SADD', key('owned:' .. id), record.number)
  redis.call('RPUSH', key('granted:' .. id), record.number)
  move(record, 'rolling', {owner = id, admitted = served, deadline = now + run.ticket_deadline_ms, to = ''})
  return ticket_reply(record)
end

local function is_free_for(number, id, since)
  local to = redis.call('HGET', key('t:' .. number), 'to') or ''
  if to == '' or to == id then return to end
  local alive = tonumber(redis.call('ZSCORE', key('alive'), to) or 0)
  return (now >= since + RESERVED_MS or alive <= now) and ''
end

-- Issued tickets that the member may start now. `named` gives only those that were handed over to it by name.
local function waiting_for(id, wanted, named)
  local found = {}
  if wanted <= 0 then return found end
  local flat = redis.call('ZRANGEBYSCORE', key('retry'), '-inf', now, 'WITHSCORES', 'LIMIT', 0, wanted + RESERVED_SCAN)
  for i = 1, #flat, 2 do
    local to = is_free_for(flat[i], id, tonumber(flat[i + 1]))
    if to and (to == id or not named) then found[#found + 1] = tonumber(flat[i]) end
    if #found == wanted then break end
  end
  return found
end

-- Issue up to `room` tickets, in their order.
local function issue(run, room)
  local issued = {}
  if run.end_ticket >= 0 then room = math.min(room, run.end_ticket - run.next) end
  for number = run.next, run.next + room - 1 do issued[#issued + 1] = number end
  if #issued > 0 then redis.call('HINCRBY', key('run'), 'next', #issued) end
  return issued
end

-- The lag of a replica that may start work, else nothing: one that is over the bound starts nothing that would
-- be too old already, and one ahead of the ledger serves a version that this run has not made.
local function lag_of(run, served)
  if run.status ~= 'running' or served > run.version then return nil end
  local lag = updates(served, run.version, lost_versions())
  return lag <= run.max_staleness and lag or nil
end

-- `sending` numbers what the client sends; `acknowledged` is the newest sending whose grant it has received.
-- `named`: only what was handed over to this member by name.
define('admit', GROWS, function(id, incarnation, wanted, served, acknowledged, named, sending)
  local run = opened()
  run.oversampling = tonumber(run.oversampling)
  expire()
  local member = live_member(id, incarnation)
  serve(id, member, served)
  local given = {}
  if sending <= member.grant then return {member.grant, given} end   -- given up by the client, nobody listens
  if acknowledged ~= member.grant then regrant(id, given) end
  redis.call('DEL', key('granted:' .. id))
  for _, ticket in ipairs(given) do redis.call('RPUSH', key('granted:' .. id), ticket[1]) end
  local lag = lag_of(run, served)
  if lag then
    local flying, stored = open_groups()
    local open, by_age = flying + stored, room_by_age(run, lag, flying, stored)
    -- What waits for another attempt is open already: while all that is open fits at this lag, it may start.
    local again = (lag == 0 or by_age >= 0) and waiting_for(id, wanted - #given, named) or {}
    for _, number in ipairs(again) do given[#given + 1] = start_rolling(read(number), id, served, run) end
    local room = named and 0 or math.min(wanted - #given, run.cap - open, by_age, room_in_bytes(run, open))
    for _, number in ipairs(issue(run, room)) do
      given[#given + 1] = start_rolling(create(number, run), id, served, run)
    end
  end
  if #given == 0 then return {member.grant, given} end   -- an idle poll writes nothing
  redis.call('HSET', key('m:' .. id), 'grant', sending)
  local partials = {}
  for _, ticket in ipairs(given) do
    if ticket[5] > 0 then partials[#partials + 1] = redis.call('HGET', key('partials'), ticket[1]) end
  end
  return {sending, given}, partials
end)

local FLIES = {rolling = true, scored = true}
local OPEN_AND_FREE = {rolling = true, scored = true, buffered = true}
local STORED = {buffered = true, taken = true, trained = true}

local function refuse_gone(record)
  refuse('FENCED', string.format('ticket %d attempt %d is %s', record.number, record.attempt, label_of(record)))
end

-- Several at once, each with an answer of its own: empty with what the transition says, or the code and the reason of
-- a refusal. A refusal comes before the first write, so the others are whole.
local function each(transition)
  return function(groups)
    local answers = {}
    for i, group in ipairs(groups) do
      local ok, problem = pcall(transition, unpack(group))
      if ok then
        answers[i] = {'', problem or ''}
      elseif type(problem) == 'table' and problem.code then
        answers[i] = {problem.code, problem.message}
      else
        error(problem)
      end
    end
    return answers
  end
end

define('scored_all', WRITES, each(function(number, attempt, owner, tokens, unscored)
  local record = owned(number, attempt, owner)
  if STORED[record.state] or record.state == 'scored' then return 'again' end   -- late or repeated: nothing to add
  if record.state ~= 'rolling' then refuse_gone(record) end
  note_tokens(record, tokens)
  for reason, samples in pairs(unscored) do add('unscored/' .. reason, samples) end
  local deadline = now + of_run('ticket_deadline_ms')   -- transport and storing get a deadline of their own
  redis.call('ZADD', key('deadlines'), deadline, number)
  move(record, 'scored', {tokens = tokens, deadline = deadline})
end))

-- The same group may come again with other rewards, from a second scoring: the first ones stay.
local function buffered(number, attempt, owner, shard, oldest, newest, tokens, informative, bytes)
  local record = owned(number, attempt, owner)
  if STORED[record.state] then
    if record.shard == shard and record.oldest == oldest and record.newest == newest
      and record.tokens == tokens then return end
    refuse('FENCED', 'ticket ' .. number .. ' is already stored, with other contents')
  end
  if not FLIES[record.state] then refuse_gone(record) end
  local version, failures, largest = of_run('version', 'failures_in_row', 'largest')
  if newest > version or oldest > newest then
    refuse('STALENESS', string.format('ticket %d is stamped with versions %d to %d, but the learner is at %d',
      number, oldest, newest, version))
  end
  leave_flight(record)
  forget_partial(record)
  note_tokens(record, tokens)
  move(record, 'buffered', {
    shard = shard, oldest = oldest, newest = newest, tokens = tokens, informative = informative, bytes = bytes,
  })
  if failures > 0 or bytes > largest then
    redis.call('HSET', key('run'), 'failures_in_row', 0, 'largest', math.max(bytes, largest))
  end
end

define('buffered', WRITES, buffered)
define('buffered_all', WRITES, each(buffered))

define('fail', WRITES, function(number, attempt, owner, reason, retry, detail)
  local asked = attempt .. '|' .. reason .. '|' .. retry .. '|'
  local record = read(number)
  if record and string.sub(record.answered, 1, #asked) == asked then   -- repeated: the same answer again
    return {string.match(string.sub(record.answered, #asked + 1), '^(%a+)|(%d+)|(%d+)$')}
  end
  record = owned(number, attempt, owner)
  if not FLIES[record.state] then refuse_gone(record) end   -- what is stored is not its owner's to give up
  local run = opened()
  local wait = BACKOFF_MS * 2 ^ math.min(record.tries, 16)
  if retry == 1 then reissue(record, run, reason, wait, true) else close(record, 'failed', reason) end
  local at = record.state == 'issued' and now + wait or 0
  local answer = string.format('%s|%d|%d', record.state, record.attempt, at)
  redis.call('HSET', key('t:' .. number), 'answered', asked .. answer)
  redis.call('HINCRBY', key('run'), 'failures_in_row', 1)
  redis.call('HSET', key('run'), 'last_failure', reason .. (detail ~= '' and ': ' .. detail or ''))
  return {string.match(answer, '^(%a+)|(%d+)|(%d+)$')}
end)

-- `owner` is empty where the run itself leaves the group out.
define('drop', WRITES, function(number, attempt, owner, reason, tokens)
  local record = owner == '' and held(number, attempt) or owned(number, attempt, owner)
  if record.state == 'dropped' and record.reason == reason then return end
  if not OPEN_AND_FREE[record.state] then refuse_gone(record) end
  if tokens >= 0 then set_tokens(record, tokens) end
  close(record, 'dropped', reason)
end)

-- A person wants a ticket out of the run, whichever attempt it is at. One that a step has taken leaves it when the step
-- gives it back; if the step is made, it has trained. Returns the state that it is in now.
define('drop_by_hand', WRITES, function(number)
  local record = known(number)
  if record.state == 'taken' then
    redis.call('SADD', key('unwanted'), number)
  elseif record.state == 'issued' or OPEN_AND_FREE[record.state] then
    redis.call('ZREM', key('retry'), number)
    close(record, 'dropped', 'by_hand')
  elseif record.reason ~= 'by_hand' then
    refuse_gone(record)
  end
  return record.state
end)

-- The attempt cannot be finished here: what it has sampled goes to the next one, if it fits into `limit` bytes
-- with what other tickets have left. `to` names the member that shall have it ('': any).
local function hand_over(number, attempt, owner, tokens, limit, to, blob)
  local asked = attempt .. '|/over|'
  local record = read(number)
  if record and string.sub(record.answered, 1, #asked) == asked then   -- repeated: the same answer again
    return string.sub(record.answered, #asked + 1) == '1'
  end
  record = owned(number, attempt, owner)
  if not FLIES[record.state] then refuse_gone(record) end
  local before = redis.call('HSTRLEN', key('partials'), number)
  local all = counted('partial_bytes') - before + #blob
  local fits = tokens > 0 and #blob > 0 and all <= limit
  set_tokens(record, tokens)
  if fits then
    redis.call('HSET', key('partials'), number, blob)
    add('partial_bytes', #blob - before)
    record.partial = tokens
  end
  record.answered = asked .. (fits and '1' or '0')
  reissue(record, opened(), 'handed_over', 0, false, to)
  return fits
end

define('hand_over', GROWS, hand_over)
define('hand_back', WRITES, function(number, attempt, owner, tokens, to)
  return hand_over(number, attempt, owner, tokens, 0, to, '')
end)

-- (version, groups) of those on their way to a buffer, by the version that each was admitted at.
define('flying', READS, function()
  local found = {}
  local flat = numbers('ZRANGE', key('flight'), 0, -1, 'WITHSCORES')
  for i = 2, #flat, 2 do
    local last = found[#found]
    if last and last[1] == flat[i] then last[2] = last[2] + 1 else found[#found + 1] = {flat[i], 1} end
  end
  return found
end)

---------------------------------------------------------------------------------------------------- steps

local function run_of(learner)
  local run = opened()
  if run.learner ~= learner then
    refuse('FENCED', 'learner ' .. learner .. ' does not hold the run; ' .. run.learner .. ' does')
  end
  return run
end

local function note_use(record, sign)
  add('uses', sign)
  if record then record.uses = record.uses + sign else redis.call('HINCRBY', key('folded'), 'uses', sign) end
end

-- Undo a step. When it was `committed`, each of its groups has one use less; one that has left the buffer since
-- (dropped, or lost and rolled out anew) stays where it is.
local function to_buffered(step, committed)
  for _, number in ipairs(sorted_members('step:' .. step)) do
    local record = read(number)
    if committed then note_use(record, -1) end
    if record and STORED[record.state] then
      move(record, 'buffered', {step = 0})
      if is_unwanted(record) then close(record, 'dropped', 'by_hand') end
    elseif record then
      write(record)
    end
  end
  redis.call('DEL', key('step:' .. step))
  redis.call('ZREM', key('steps'), step)
end

define('claim_learner', WRITES, function(learner)
  local run = opened()
  refuse_retired('learner', learner)
  if run.learner ~= '' and run.learner ~= learner then retire('learner', run.learner) end
  redis.call('HSET', key('run'), 'learner', learner, 'has_committed', 0)
  return run_reply()
end)

define('take', WRITES, function(step, tickets, learner)
  local run = run_of(learner)
  if step ~= run.step + 1 then
    refuse('LEDGER', 'step ' .. step .. ' cannot be taken, the next step is ' .. (run.step + 1))
  end
  expire()
  local taken, refused = {}, {}
  for _, ticket in ipairs(tickets) do
    local number, attempt = ticket[1], ticket[2]
    local record = read(number)
    local fits = record and record.attempt == attempt
    if fits and record.state == 'buffered' then
      move(record, 'taken', {step = step})
      redis.call('SADD', key('step:' .. step), number)
    end
    if fits and record.state == 'taken' then
      taken[#taken + 1] = ticket
    else
      local why = not record and 'closed' or not fits and 'fenced' or label_of(record)
      refused[#refused + 1] = {number, attempt, why}
    end
  end
  if #taken > 0 then redis.call('ZADD', key('steps'), step, step) end
  return {taken, refused}
end)

-- Tickets of a step that are taken or trained, and not folded yet.
define('taken', READS, function(step) return sorted_members('step:' .. step) end)

-- (ticket, attempt, state) of those that have a record; the others are folded, or were never issued.
define('states', READS, function(tickets)
  local found = {}
  for _, number in ipairs(tickets) do
    local record = redis.call('HMGET', key('t:' .. number), 'attempt', 'state')
    if record[1] then found[#found + 1] = {number, tonumber(record[1]), record[2]} end
  end
  return found
end)

-- (ticket, attempt, shard, state) of the groups of which a buffer may have something, in batches.
define('stored', READS, function(after, limit)
  local batch = numbers('ZRANGEBYSCORE', key('records'), '(' .. after, '+inf', 'LIMIT', 0, limit)
  local found = {}
  for _, number in ipairs(batch) do
    local record = redis.call('HMGET', key('t:' .. number), 'state', 'attempt', 'shard')
    if FLIES[record[1]] or STORED[record[1]] then
      found[#found + 1] = {number, tonumber(record[2]), record[3], record[1]}
    end
  end
  return {batch[#batch] or after, #batch, found}
end)

-- A shard has lost what it stored (`state` is buffered), or groups that should have come to it are nowhere (scored):
-- they are rolled out anew, and nobody is to blame.
define('give_back', WRITES, function(shard, tickets, state)
  local run, back = opened(), {}
  for _, ticket in ipairs(tickets) do
    local record = read(ticket[1])
    local its = record and (state == 'scored' or record.shard == shard)
    if its and record.attempt == ticket[2] and record.state == state then
      reissue(record, run, 'lost', 0, false)
      if state == 'buffered' then add('lost', 1) end
      back[#back + 1] = ticket[1]
    end
  end
  return back
end)

local function refuse_committed(step, run)
  if step <= run.step then refuse('LEDGER', 'step ' .. step .. ' is committed; a rollback undoes it') end
end

define('untake', WRITES, function(step, learner)
  refuse_committed(step, run_of(learner))
  to_buffered(step, false)
end)

local FREE = {buffered = true, taken = true}   -- stored, and in no step that is made

-- A batch that cannot make the step: the named groups leave it, each by its reason, and the others are free again.
-- One that is to come again (`how` is 1) is issued anew as long as it has attempts left and no step has used it, else
-- dropped; one that nobody can train on (2) has failed.
-- What had left before, as when the call is repeated, stays where it is.
define('set_aside', WRITES, function(step, learner, groups)
  local run = run_of(learner)
  refuse_committed(step, run)
  for _, group in ipairs(groups) do
    local number, attempt, reason, how = unpack(group)
    local record = read(number)
    if record and record.attempt == attempt and FREE[record.state] then
      redis.call('SREM', key('step:' .. step), number)
      record.step = 0
      if is_unwanted(record) then how, reason = 0, 'by_hand' end
      if how == 1 and record.uses == 0 and record.tries + 1 < run.max_attempts then
        reissue(record, run, reason, 0, true)
      else
        close(record, how == 2 and 'failed' or 'dropped', reason)
      end
    end
  end
  to_buffered(step, false)
end)

-- The step's groups that the learner names, as records that it may still decide about.
local function named(tickets)
  local found = {}
  for i, ticket in ipairs(tickets) do
    found[i] = held(ticket[1], ticket[2])
    if not FREE[found[i].state] then refuse_gone(found[i]) end
  end
  return found
end

-- A step is a new version: what moved no weights is no step. `tickets` is what the learner trained on, and that is
-- what becomes trained: a take or an untake that arrives late does not change it. Without a list it is what the step
-- has taken. `idle` are groups of the batch that had no part in an update, each with its reason: they are dropped. A
-- group that may be used again is buffered again; it stays among the step's groups, so that a rollback takes this use
-- back.
define('commit', WRITES, function(step, version, learner, tickets, idle)
  local run = run_of(learner)
  if step == run.step and version == run.version then return run_reply() end   -- repeated
  if step ~= run.step + 1 then
    refuse('LEDGER', 'step ' .. step .. ' cannot be committed, the next step is ' .. (run.step + 1))
  end
  if version ~= run.version + 1 then
    refuse('LEDGER', 'version ' .. version .. ' cannot follow version ' .. run.version .. ' by one step')
  end
  local trained, without = named(tickets), named(idle)
  if #tickets == 0 then
    for i, number in ipairs(sorted_members('step:' .. step)) do trained[i] = read(number) end
  end
  if #trained == 0 then refuse('LEDGER', 'step ' .. step .. ' has taken no groups') end
  for i, record in ipairs(without) do
    redis.call('SREM', key('step:' .. step), record.number)
    record.step = 0
    is_unwanted(record)   -- it goes anyway
    close(record, 'dropped', idle[i][3])
  end
  for _, record in ipairs(trained) do
    redis.call('SREM', key('step:' .. step), record.number)
    note_use(record, 1)
    move(record, record.uses < (run.reuse or 1) and 'buffered' or 'trained', {step = step})
    if is_unwanted(record) and record.state == 'buffered' then close(record, 'dropped', 'by_hand') end
  end
  to_buffered(step, false)
  for _, record in ipairs(trained) do redis.call('SADD', key('step:' .. step), record.number) end
  redis.call('ZADD', key('steps'), step, step)
  redis.call('HSET', key('run'), 'step', step, 'version', version, 'has_committed', 1)
  redis.call('HSET', key('made'), step, learner)
  return run_reply()
end)

define('advance_version', WRITES, function(version, learner)
  local run = run_of(learner)
  if version < run.version then
    refuse('LEDGER', 'version ' .. version .. ' is behind the ledger, which is at ' .. run.version)
  end
  redis.call('HSET', key('run'), 'version', version)
end)

local function forget_makers(over)
  for _, made in ipairs(numbers('HKEYS', key('made'))) do
    if over(made) then redis.call('HDEL', key('made'), made) end
  end
end

-- Which learner made each step of the line of descent, from the durable one on. A checkpoint of such a step by
-- another learner is of a line that was given up.
define('makers', READS, function() return {redis.call('HGETALL', key('made'))} end)

define('durable', WRITES, function(step, learner)
  local run = run_of(learner)
  if step > run.step then refuse('LEDGER', 'step ' .. step .. ' is not committed, the run is at ' .. run.step) end
  for _, done in ipairs(numbers('ZRANGEBYSCORE', key('steps'), '-inf', step)) do
    local over = {}
    for _, number in ipairs(sorted_members('step:' .. done)) do
      local record = redis.call('HMGET', key('t:' .. number), 'state', 'step')
      if record[1] == 'trained' and tonumber(record[2]) <= step then over[#over + 1] = number end
    end
    fold(over)
    redis.call('DEL', key('step:' .. done))
    redis.call('ZREM', key('steps'), done)
  end
  if step > run.durable_step then redis.call('HSET', key('run'), 'durable_step', step) end
  forget_makers(function(made) return made < step end)
end)

-- `told`: a version that the learner's own files name, though a ledger that lost writes may not know of it.
define('rollback', WRITES, function(step, version, learner, told)
  local run = run_of(learner)
  if step < run.durable_step then
    refuse('LEDGER', 'step ' .. step .. ' is before step ' .. run.durable_step .. ', which is durable')
  end
  if step > run.step then refuse('LEDGER', 'step ' .. step .. ' is not committed, the run is at ' .. run.step) end
  if step < run.step and run.has_committed == 1 then
    refuse('LEDGER', 'learner ' .. learner .. ' has committed since it claimed the run; claim it again')
  end
  for _, undone in ipairs(numbers('ZRANGEBYSCORE', key('steps'), '(' .. step, '+inf')) do
    to_buffered(undone, undone <= run.step)
  end
  local newest = math.max(run.version, told)
  if (step < run.step or newest > run.version) and version < newest then
    redis.call('RPUSH', key('lost'), (version + 1) .. '-' .. newest)
  end
  redis.call('HSET', key('run'), 'step', step, 'version', newest)
  forget_makers(function(made) return made > step end)
  return run_reply()
end)

-- Tickets folded since fold number `since`: one by one while they are listed, else as bitmaps.
define('folded', READS, function(since)
  local folds = opened().folds
  local listed = redis.call('LRANGE', key('folds'), 0, -1)
  local first = folds - #listed
  if since < first then
    local bitmaps = {}
    for i, label in ipairs(folded_labels()) do bitmaps[i] = redis.call('GET', key('bits:' .. label)) end
    return {folds, {}}, bitmaps
  end
  local tickets = {}
  for i = since - first + 1, #listed do
    for _, number in ipairs(cmsgpack.unpack(listed[i])) do tickets[#tickets + 1] = number end
  end
  return {folds, tickets}
end)

define('announce', WRITES, function(version, learner, manifest)
  local run = run_of(learner)
  local announced = tonumber(redis.call('HGET', key('manifest'), 'version') or -1)
  if version < announced then
    refuse('LEDGER', 'version ' .. version .. ' cannot be announced after version ' .. announced)
  end
  if version > run.version then
    refuse('LEDGER', 'version ' .. version .. ' is not committed, the run is at ' .. run.version)
  end
  redis.call('HSET', key('manifest'), 'version', version, 'manifest', manifest)
end)

-- Only one that is newer than what the caller has: it asks often, and a manifest is not small.
define('manifest', READS, function(newer_than)
  local version = tonumber(redis.call('HGET', key('manifest'), 'version') or -1)
  if version <= newer_than then return -1 end
  return version, {redis.call('HGET', key('manifest'), 'manifest')}
end)

---------------------------------------------------------------------------------------------------- evaluation

local function unfinished(job, fields)
  return fields.deadline > now and redis.call('HLEN', key('e:' .. job .. ':results')) < fields.items
end

local function anyone_serves(version)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('alive'), '(' .. now, '+inf')) do
    local found = redis.call('HMGET', key('m:' .. id), 'version', 'role')
    if tonumber(found[1]) == version and found[2] == 'rollout' then return true end
  end
  return false
end

local function forget_claims(job)
  for _, id in ipairs(redis.call('HVALS', key('e:' .. job .. ':claims'))) do
    for _, item in ipairs(redis.call('SMEMBERS', key('items:' .. id))) do
      if string.match(item, '^(.*):%d+$') == job then redis.call('SREM', key('items:' .. id), item) end
    end
  end
  redis.call('DEL', key('e:' .. job .. ':back'), key('e:' .. job .. ':claims'), key('e:' .. job .. ':results'))
end

-- Whether a replica that serves `served` may work on the job; pins the job to its version when none is set, or
-- when nobody is left to finish at the pinned one.
local function pin(job, fields, served)
  if fields.pinned == served then return true end
  if served < fields.min_version then return false end
  if fields.pinned >= 0 then
    if anyone_serves(fields.pinned) then return false end
    forget_claims(job)
  end
  fields.pinned, fields.next = served, 0
  redis.call('HSET', key('e:' .. job), 'pinned', served, 'next', 0)
  return true
end

local function claim_items(job, fields, id, wanted)
  local given = numbers('SPOP', key('e:' .. job .. ':back'), wanted)
  local fresh = math.min(wanted - #given, fields.items - fields.next)
  for index = fields.next, fields.next + fresh - 1 do given[#given + 1] = index end
  if fresh > 0 then redis.call('HINCRBY', key('e:' .. job), 'next', fresh) end
  for _, index in ipairs(given) do
    redis.call('HSET', key('e:' .. job .. ':claims'), index, id)
    redis.call('SADD', key('items:' .. id), job .. ':' .. index)
  end
  table.sort(given)
  return given
end

-- What a lost reply had claimed. Its job is one job: a claim never mixes them.
local function reclaim(member, id)
  local job, given = member.eval_job or '', {}
  local fields = hash('e:' .. job)
  if not fields then return job, given, -1 end
  for index in string.gmatch(member.eval_items or '', '%d+') do
    if redis.call('HGET', key('e:' .. job .. ':claims'), index) == id then given[#given + 1] = tonumber(index) end
  end
  return job, given, fields.pinned
end

define('open_eval', GROWS, function(job, items, min_version, deadline_ms)
  local before = hash('e:' .. job)
  if before then
    if before.items ~= items or before.min_version ~= min_version then
      refuse('LEDGER', 'evaluation ' .. job .. ' is already open with other terms')
    end
    return
  end
  redis.call('HSET', key('e:' .. job), 'items', items, 'min_version', min_version, 'deadline', now + deadline_ms,
    'pinned', -1, 'next', 0)
  redis.call('ZADD', key('evals'), redis.call('INCR', key('eval_serial')), job)
end)

define('claim_eval', GROWS, function(id, incarnation, wanted, served, acknowledged, sending)
  expire()
  local member = live_member(id, incarnation)
  serve(id, member, served)
  local job, given, pinned = '', {}, -1
  if sending <= member.eval_grant then return {member.eval_grant, job, pinned, given} end
  if acknowledged ~= member.eval_grant then job, given, pinned = reclaim(member, id) end
  if #given == 0 then
    for _, candidate in ipairs(redis.call('ZRANGE', key('evals'), 0, -1)) do
      local fields = hash('e:' .. candidate)
      if unfinished(candidate, fields) and pin(candidate, fields, served) then
        job, pinned, given = candidate, fields.pinned, claim_items(candidate, fields, id, wanted)
        if #given > 0 then break end
      end
    end
  end
  if #given == 0 then return {member.eval_grant, '', -1, given} end
  redis.call('HSET', key('m:' .. id), 'eval_job', job, 'eval_items', table.concat(given, ' '),
    'eval_grant', sending)
  return {sending, job, pinned, given}
end)

-- Whoever has claimed the item reports it; what was reported stays, and a repeated call finds it there.
define('report_eval', WRITES, function(job, index, owner, version, result)
  local fields = hash('e:' .. job)
  if not fields then refuse('FENCED', 'evaluation ' .. job .. ' is closed') end
  if fields.pinned ~= version then
    refuse('FENCED', string.format('evaluation %s is pinned to version %d, not %d', job, fields.pinned, version))
  end
  if index < 0 or index >= fields.items then refuse('LEDGER', 'evaluation ' .. job .. ' has no item ' .. index) end
  if redis.call('HEXISTS', key('e:' .. job .. ':results'), index) == 1 then return false end
  local claimant = redis.call('HGET', key('e:' .. job .. ':claims'), index)
  if claimant ~= owner then
    refuse('FENCED', string.format('item %d of evaluation %s is claimed by %s, not by %s', index, job,
      claimant or 'nobody', owner))
  end
  redis.call('SREM', key('items:' .. owner), job .. ':' .. index)
  redis.call('HDEL', key('e:' .. job .. ':claims'), index)
  redis.call('HSET', key('e:' .. job .. ':results'), index, result)
  return true
end)

define('eval_status', READS, function(job)
  local fields = hash('e:' .. job) or refuse('LEDGER', 'evaluation ' .. job .. ' is not open')
  local done = redis.call('HLEN', key('e:' .. job .. ':results'))
  return {done, fields.items, fields.pinned, fields.deadline <= now and done < fields.items}
end)

define('eval_results', READS, function(job)
  if not hash('e:' .. job) then refuse('LEDGER', 'evaluation ' .. job .. ' is not open') end
  return nil, redis.call('HGETALL', key('e:' .. job .. ':results'))
end)

define('close_eval', WRITES, function(job)
  forget_claims(job)
  redis.call('DEL', key('e:' .. job))
  redis.call('ZREM', key('evals'), job)
end)

---------------------------------------------------------------------------------------------------- the book

define('counts', READS, function()
  return {opened().next, redis.call('HGETALL', key('counts'))}
end)

-- Every ticket was issued, and all that are open lie in a buffer: the learner may take a last, smaller batch.
define('end_of_data', READS, function()
  local run = opened()
  local waiting = redis.call('ZCARD', key('retry')) + redis.call('ZCARD', key('flight'))
  return run.end_ticket >= 0 and run.next >= run.end_ticket and waiting == 0
end)

local function book(run)
  local bits = {}
  for i, label in ipairs(folded_labels()) do bits[i] = {label, redis.call('BITCOUNT', key('bits:' .. label))} end
  return {
    run.next, redis.call('HGETALL', key('counts')), redis.call('HGETALL', key('folded')), bits,
    redis.call('ZCARD', key('retry')), redis.call('ZCARD', key('flight')), redis.call('ZCARD', key('deadlines')),
    redis.call('HLEN', key('partials')), run.step, run.version, redis.call('LRANGE', key('lost'), 0, -1),
  }
end

-- One batch of the audit's scan, with the change counter and the book that the sums must be equal to.
define('scan', READS, function(after, limit)
  local run = opened()
  local batch = numbers('ZRANGEBYSCORE', key('records'), '(' .. after, '+inf', 'LIMIT', 0, limit)
  local found = {}
  for i, number in ipairs(batch) do
    local record = read(number)
    found[i] = {
      label_of(record), record.tokens, record.uses, LIES[record.state] and record.bytes or 0,
      record.partial > 0 and redis.call('HSTRLEN', key('partials'), record.number) or 0,
    }
  end
  return {run.changes, batch[#batch] or after, found, book(run)}
end)

define('snapshot', READS, function()
  opened()
  local records = {}
  for _, number in ipairs(numbers('ZRANGE', key('records'), 0, -1)) do
    local flat = redis.call('HGETALL', key('t:' .. number))
    flat[#flat + 1] = 'number'
    flat[#flat + 1] = tostring(number)
    records[#records + 1] = flat
  end
  local labels, bitmaps = folded_labels(), {}
  for i, label in ipairs(labels) do bitmaps[i] = redis.call('GET', key('bits:' .. label)) end
  local discarded = tonumber(redis.call('HGET', key('counts'), 'tokens_discarded') or 0)
  return {
    redis.call('HGETALL', key('run')), records, redis.call('HGETALL', key('folded')), labels,
    redis.call('LRANGE', key('lost'), 0, -1), discarded,
  }, bitmaps
end)

local function wipe()
  for _, number in ipairs(redis.call('ZRANGE', key('records'), 0, -1)) do redis.call('DEL', key('t:' .. number)) end
  for _, step in ipairs(redis.call('ZRANGE', key('steps'), 0, -1)) do redis.call('DEL', key('step:' .. step)) end
  for _, label in ipairs(folded_labels()) do redis.call('DEL', key('bits:' .. label)) end
  for _, id in ipairs(redis.call('ZRANGE', key('alive'), 0, -1)) do
    redis.call('DEL', key('owned:' .. id), key('granted:' .. id))
  end
  for _, name in ipairs({'run', 'counts', 'folded', 'folds', 'records', 'retry', 'flight', 'deadlines', 'steps',
    'closed', 'lost', 'manifest', 'partials', 'made', 'unwanted'}) do redis.call('DEL', key(name)) end
end

-- What was on its way when the snapshot was made is issued again; what was stored is still in its buffer.
local function restore_record(record, run)
  redis.call('ZADD', key('records'), record.number, record.number)
  if FLIES[record.state] or record.state == 'issued' then
    record.state, record.owner, record.tokens, record.attempt = 'issued', '', 0, run.attempt_base
    record.bytes, record.partial, record.to = 0, 0, ''
    redis.call('ZADD', key('retry'), now, record.number)
  elseif record.state == 'taken' then
    record.state, record.step = 'buffered', 0
  elseif record.state == 'trained' then
    redis.call('SADD', key('step:' .. record.step), record.number)
    redis.call('ZADD', key('steps'), record.step, record.step)
  elseif record.state ~= 'buffered' then
    redis.call('RPUSH', key('closed'), record.number)
  end
  count(record, 1)
  write(record)
  add('tokens_in', record.tokens)
  add('uses', record.uses)
end

-- `back` is 1 where a person gives up what is newer than the snapshot.
define('restore', GROWS, function(digest, back, fields, records, folded, labels, lost, discarded, ...)
  local run = hash('run')
  if run and run.restored == digest then return run_reply() end   -- repeated
  local version = tonumber(fields.version)
  if run and run.version >= version and back == 0 then
    refuse('LEDGER', 'the ledger is at version ' .. run.version .. ', the snapshot at ' .. version)
  end
  wipe()
  -- Attempts go on from the clock: a group of the lost ledger must not pass for one of this.
  fields.attempt_base = math.max(tonumber(fields.attempt_base) + 1, math.floor(now / 1000))
  fields.restored, fields.learner, fields.folds = digest, '', 0
  for field, value in pairs(fields) do redis.call('HSET', key('run'), field, value) end
  run = hash('run')
  for _, flat in ipairs(records) do
    for field, value in pairs(flat) do flat[field] = NUMERIC[field] and tonumber(value) or value end
    flat.number, flat.uses, flat.bytes = tonumber(flat.number), flat.uses or 0, flat.bytes or 0
    restore_record(flat, run)
  end
  for i, label in ipairs(labels) do redis.call('SET', key('bits:' .. label), (select(i, ...))) end
  for field, value in pairs(folded) do
    redis.call('HSET', key('folded'), field, value)
    add(field, tonumber(value))
    if string.match(field, '^tokens:') then add('tokens_in', tonumber(value)) end
  end
  add('tokens_in', discarded)
  add('tokens_discarded', discarded)
  for _, range in ipairs(lost) do redis.call('RPUSH', key('lost'), range) end
  return run_reply()
end)
