//! The commands `linux` and `initrd` of a menu entry (`grub-core/loader/linux.c`, `grub-core/lib/cmdline.c`).

use super::expand::Argument;
use super::state::{Load, Loaded, State};
use super::world::split;

/// Longest command line that is kept. Linux has room for 2,047 bytes.
const MAX_OPTIONS: usize = 16 << 10;
/// Maximum number of initial ramdisks.
const MAX_INITRDS: usize = 16;

/// Carries out `linux FILE OPTION...`.
pub(super) fn linux(arguments: &[Argument], state: &mut State) {
    let loaded = (|| {
        let (kernel, options) = arguments.split_first().ok_or("its `linux` has no file")?;
        let kernel = file(kernel, state)?;
        let mut line = String::new();
        for option in options {
            if !line.is_empty() {
                line.push(' ');
            }
            push_option(&mut line, known(option)?);
            if line.len() > MAX_OPTIONS {
                return Err("its command line is too long".to_owned());
            }
        }
        Ok::<_, String>((kernel, line))
    })();
    match loaded {
        // GRUB forgets what was loaded before.
        Ok((kernel, options)) => {
            state.load = Load {
                kernel: Some(kernel),
                options,
                initrds: Vec::new(),
                trouble: state.load.trouble.take(),
            };
        }
        Err(why) => {
            state.load.trouble.get_or_insert(why);
        }
    }
}

/// Carries out `initrd FILE...`.
pub(super) fn initrd(arguments: &[Argument], state: &mut State) {
    let files = arguments.iter().take(MAX_INITRDS + 1);
    let files = files.map(|argument| file(argument, state));
    match files.collect::<Result<Vec<_>, _>>() {
        Ok(files) if files.len() <= MAX_INITRDS => state.load.initrds = files,
        Ok(_) => {
            let why = "it has too many initial ramdisks".to_owned();
            state.load.trouble.get_or_insert(why);
        }
        Err(why) => {
            state.load.trouble.get_or_insert(why);
        }
    }
}

/// Returns the file that an argument names.
fn file(argument: &Argument, state: &State) -> Result<Loaded, String> {
    let name = known(argument)?;
    if name.starts_with("newc:") {
        return Err("it makes an initial ramdisk of single files (`newc:`)".to_owned());
    }
    let (device, path) = split(name);
    let device = match device {
        Some(device) => device,
        None => state.get("root").ok_or_else(|| unknown("root"))?,
    };
    if !path.starts_with('/') {
        return Err(format!("its file `{name}` has no absolute path"));
    }
    Ok(Loaded {
        device: device.to_owned(),
        path: path.to_owned(),
    })
}

fn known(argument: &Argument) -> Result<&str, String> {
    match argument {
        Argument::Known(text) => Ok(text),
        Argument::Unknown(name) => Err(unknown(name)),
    }
}

fn unknown(variable: &str) -> String {
    format!("it needs ${variable}, whose value only the machine can tell")
}

/// Adds an option as GRUB passes it on: with its quotes escaped, and in quotes if it has spaces.
fn push_option(line: &mut String, option: &str) {
    let quote = if option.contains(' ') { "\"" } else { "" };
    line.push_str(quote);
    for c in option.chars() {
        if matches!(c, '\\' | '\'' | '"') {
            line.push('\\');
        }
        line.push(c);
    }
    line.push_str(quote);
}
