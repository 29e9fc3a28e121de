"""From one look at the job to verdicts. Pure: no I/O, no clock, no torch; what is remembered travels in State.

Start with judge, then causes (why one rank is not where the others wait for it) and hangs.

the frame
  judge          one look in, verdicts and wanted evidence out: the order of all this
  state          what is remembered between two looks
  scene          what every rule looks at
  finding        what is found of one rank: cause, place, how long that may last
  clocks         gaps between looks, clocks that are set, times in recorders
  timeouts       when the watchdogs fire, and the line that sets a longer timeout
  watchdog       after NCCL's has fired: when the end comes, what it has printed, an abort that never returns
  wants          which evidence to fetch next
  witnesses      whether evidence was seen twice, or one report looked at twice
  words          what people read, and what to do

who waits, and whom for
  views          one process group through all its ranks: who entered what, who has it done
  waits          who waits for whom, from collectives and barriers
  starts         waits in the store: ranks that start, or make a group
  early          ranks that have joined and wait for some that have not
  stores         waits in the store outside of any group's
  graph          from waits to their roots
  silence        waits for ranks of nodes that do not answer
  checked        waits in torch's own checks of collectives (TORCH_DISTRIBUTED_DEBUG=DETAIL), which stacks alone show
  inside         which call of torch.distributed a stack is in, where no recorder tells

why, and how grave
  hangs          one hang judged: verdict, culprits, words
  absent         ranks that have not come: who of them is to blame
  ahead          operations posted ahead, in which nobody sits yet
  entered        ranks that have come, but to different things, or that are all in
  devices        all in, and it does not complete: what the driver, NCCL's RAS and the timing tell of whose device or network it is
  xids           what the NVIDIA driver's error numbers mean, and what to do
  causes         why one rank is not where the others wait for it; the order of its tests is the precedence of the causes
  work           what the stack says of a rank that is elsewhere: loading, saving, a transfer, a debugger, a line of the job
  thread_waits   what a main thread waits for that waits for another thread
  known_work     the table of known work: which frame of which library means what
  progress       whether a suspect gets anywhere
  messages       absent ranks that wait for a message themselves
  handles        absent ranks whose native stack would show a wait for a message, and what it shows
  mismatch       different operations at the same number of a group
  rhythm         whose turn it was, by the history of a group's calls
  frames         the line of the user's code in a stack
  stacks         equal stacks together
  idle           a job that moves no more with nothing open in any recorder
  captured       what a recorder does not show of ranks that use CUDA graphs
  replays        a rank that has stopped replaying its CUDA graph while others wait on their devices
  suspended      all ranks stopped at once
  unhealed       waits that are over without having healed
  unseen         waits that are out of sight: after a pause, or of a node that does not answer

ends
  deaths         which rank ended badly first, and which only followed
  ends           how a rank ended: exit codes, signals, the words of its exception
  gpu_oom        a rank that ended because its GPU had no memory left
  blame          who is named for ranks that ended badly, and in which words
  victims        ranks that lost a peer, or timed out themselves
  gave_up        ranks that ended of their own will because another kept them waiting
  unspoken       the one rank that said nothing where all others spoke of a timeout
  aborts         a rank that gloo has aborted
  lost_nodes     a node that died as a whole, and whose peers died of it
  leavers        a rank that has left its process group and lives on
  joins          init_process_group that does not come about though nobody is missing
  unjoined       ranks whose own init_process_group raised something about connections
  torchs_words   whom torch itself names in what the others raise: mismatches that it has checked for, barriers not passed
  repeats        attempts that end alike, one after another

a job that goes on
  pairing        different operations paired without hanging: garbage
  lateness       stragglers
  arrivals       who came last, and by how much
  readings       from recorder entries to arrivals
  found_waiting  lateness by status numbers alone
  ledger         what waiting costs
"""

from rankwatch.monitor.diagnose.judge import diagnose
from rankwatch.monitor.diagnose.state import State

__all__ = ["State", "diagnose"]
