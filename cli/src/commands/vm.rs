//! `hvprobe vm`: manages machines of a server.

mod logs;
mod watch;

use std::process::ExitCode;

use hvprobe_proto::v1::{
    DeleteMachineRequest, EndReason, Ending, InjectNmiRequest, ListMachinesRequest, Machine,
    PauseRequest, ResumeRequest, StopRequest, WaitRequest,
};

use super::doctor;
use crate::client::Client;
use crate::definitions::events_file;
use crate::definitions::guest::{self, Requested};
use crate::failure::{DONE, FAILED, INTERRUPTED, Refused, answered, as_sent, done};
use crate::follow::console::{Console, Step};
use crate::options::server::NamedMachine;
use crate::options::vm::{Boot, Vm};
use crate::output::words::Word as _;
use crate::output::{self, json, skipped, table};
use crate::terminal::signals::Interrupt;

pub(crate) async fn vm(command: Vm) -> anyhow::Result<ExitCode> {
    match command {
        Vm::Boot(boot) => {
            let Boot {
                server,
                name,
                labels,
                guest,
                hold,
                json,
            } = *boot;
            let Requested {
                request,
                histograms,
                origins,
                ..
            } = guest::request(name, labels, guest, &hold)?;
            events_file::refuse(&histograms, "`hvprobe vm boot`")?;
            let mut client = Client::connect(&server).await?;
            let definitions = as_sent(&request.probes, &origins);
            let answer = client.machines.boot(request).await;
            let answer = answer.map_err(|status| Refused::of_probes(status, &definitions))?;
            let machine = answer.into_inner();
            if json {
                json::print(&json::Shown(&machine))?;
            } else {
                output::print(&machine.name)?;
            }
            if let Some(skipped) = skipped::text(&machine.skipped) {
                output::notice(format_args!("{skipped}"));
            }
            if let Some(doubt) = doctor::doubt(&mut client, &machine).await {
                output::notice(format_args!("warning: {doubt}"));
            }
            Ok(DONE)
        }
        Vm::List {
            server,
            labels,
            states,
            watch,
            json,
        } => {
            let mut client = Client::connect(&server).await?;
            let labels = labels.into_iter().map(|label| (label.name, label.value));
            if watch {
                return watch::watch(client, labels.collect(), json).await;
            }
            let states = states.into_iter().map(i32::from);
            let request = ListMachinesRequest {
                labels: labels.collect(),
                states: states.collect(),
                ..ListMachinesRequest::default()
            };
            let machines = client.list_machines(request).await?;
            if json {
                for machine in &machines {
                    json::print(&json::Shown(machine))?;
                }
            } else {
                output::print(&table::machines(&machines))?;
            }
            Ok(DONE)
        }
        Vm::Show(on) => {
            let (mut client, machine) = find(&on).await?;
            let machine = client.get_machine(machine).await?;
            json::print(&json::Shown(&machine))?;
            Ok(DONE)
        }
        Vm::Wait(on) => {
            let mut interrupt = Interrupt::install()?;
            let (mut client, machine) = find(&on).await?;
            let ended = tokio::select! {
                ended = client.machines.wait(WaitRequest { machine }) => ended,
                () = interrupt.asked() => return Ok(ExitCode::from(INTERRUPTED)),
            };
            let machine = answered(ended)?;
            report_state(&machine)?;
            Ok(ExitCode::from(status(&machine.ending.unwrap_or_default())))
        }
        Vm::Remove { server, machine } => {
            let mut client = Client::connect(&server).await?;
            let request = DeleteMachineRequest { machine };
            done(client.machines.delete_machine(request).await)
        }
        Vm::Pause(on) => {
            let (mut client, machine) = find(&on).await?;
            let request = PauseRequest {
                machine,
                ..Default::default()
            };
            let machine = answered(client.machines.pause(request).await)?;
            report_state(&machine)
        }
        Vm::Resume(on) => {
            let (mut client, machine) = find(&on).await?;
            let machine = answered(client.machines.resume(ResumeRequest { machine }).await)?;
            report_state(&machine)
        }
        Vm::Nmi { on, cpu } => {
            let (mut client, machine) = find(&on).await?;
            let name = machine.clone();
            let request = InjectNmiRequest { machine, cpu };
            answered(client.machines.inject_nmi(request).await)?;
            match cpu {
                Some(cpu) => output::notice(format_args!("{name}: NMI sent to CPU {cpu}")),
                None => output::notice(format_args!("{name}: NMI sent to all CPUs")),
            }
            Ok(DONE)
        }
        Vm::Stop(on) => {
            let (mut client, machine) = find(&on).await?;
            let machine = answered(client.machines.stop(StopRequest { machine }).await)?;
            report_state(&machine)
        }
        Vm::Logs { on, follow } => {
            let (client, machine) = find(&on).await?;
            logs::logs(client, machine, follow).await
        }
        Vm::Console(on) => {
            let mut interrupt = Interrupt::install()?;
            let (client, machine) = find(&on).await?;
            let mut console = Console::connect(client, &machine).await?;
            loop {
                let step = tokio::select! {
                    step = console.step() => step?,
                    () = interrupt.asked() => return Ok(ExitCode::from(INTERRUPTED)),
                };
                match step {
                    Step::More => {}
                    Step::Leave | Step::Ended => return Ok(DONE),
                }
            }
        }
    }
}

async fn find(on: &NamedMachine) -> anyhow::Result<(Client, String)> {
    let mut client = Client::connect(&on.server).await?;
    let machine = client.machine(on.vm.as_deref()).await?;
    Ok((client, machine))
}

/// Returns the exit status for the end of a guest: that of its command, if there is one. A reset may follow a
/// panic.
fn status(ending: &Ending) -> u8 {
    match (ending.guest_status, ending.reason()) {
        (_, EndReason::Crash) => FAILED,
        (Some(status), _) => u8::try_from(status).unwrap_or(FAILED),
        (None, EndReason::Shutdown | EndReason::Stopped) => 0,
        (None, EndReason::Reset | EndReason::TripleFault | EndReason::Unspecified) => FAILED,
    }
}

/// Reports the state of `machine`.
fn report_state(machine: &Machine) -> anyhow::Result<ExitCode> {
    let state = machine.state().or_unknown();
    match &machine.ending {
        Some(ending) => output::notice(format_args!(
            "{} {state}: {}",
            machine.name,
            table::ending_text(ending)
        )),
        None => output::notice(format_args!("{} {state}", machine.name)),
    }
    Ok(DONE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_did_not_end_by_itself_has_failed() {
        let ended = |reason: EndReason, guest_status| {
            status(&Ending {
                reason: reason.into(),
                guest_status,
                ..Ending::default()
            })
        };
        for (reason, without, with) in [
            (EndReason::Shutdown, 0, 7),
            (EndReason::Stopped, 0, 7),
            (EndReason::Reset, FAILED, 7),
            (EndReason::TripleFault, FAILED, 7),
            (EndReason::Crash, FAILED, FAILED),
            (EndReason::Unspecified, FAILED, 7),
        ] {
            assert_eq!(ended(reason, None), without, "{reason:?}");
            assert_eq!(ended(reason, Some(7)), with, "{reason:?}");
        }
        assert_eq!(ended(EndReason::Reset, Some(300)), FAILED);
    }
}
