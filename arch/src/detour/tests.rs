use super::*;
use crate::condition::{Comparison, Condition};
use crate::insn::testing::bytes;
use crate::regs::{Gpr, RegisterSet};
use expect_test::{Expect, expect};
use iced_x86::{Decoder, DecoderOptions};

const AT: Gva = Gva(0xffff_ffff_8123_4560);
const DETOUR: Gva = Gva(0xffff_ffff_8004_0000);
const RING: Ring = Ring {
    head: Gva(0xffff_ffff_8010_0000),
    tail: Gva(0xffff_ffff_8010_0040),
    cells: Gva(0xffff_ffff_8010_1000),
    capacity: 1024,
    watermark: 512,
    doorbell_port: 0x5e,
};
const LOST: Gva = Gva(0xffff_ffff_8010_0080);
const VETOED: Gva = Gva(0xffff_ffff_8010_0088);
const INSTANCES: Instances = Instances {
    at: Gva(0xffff_ffff_8020_0000),
    count: 3,
    free: Gva(0xffff_ffff_8010_00c0),
};

fn span(hex: &str) -> Span {
    Span::find(&bytes(hex), AT, AT).unwrap()
}

fn text(code: &[u8], at: Gva) -> String {
    let mut lines = String::new();
    for instruction in Decoder::with_ip(64, code, at.0, DecoderOptions::NONE).iter() {
        let line = format!("{:x} {instruction}\n", instruction.ip() & 0xffff_ffff);
        lines.push_str(&line);
    }
    lines
}

fn record(capture: &Capture) -> Part<'_> {
    Part::Record {
        source: 9,
        capture,
        lost: LOST,
    }
}

fn few() -> Capture {
    Capture {
        registers: RegisterSet::from_iter([Gpr::Rdi, Gpr::Rcx]),
        stack: vec![1],
        task: None,
        cpu: Some(0x1_0000),
    }
}

#[test]
fn a_detour_of_the_kernel_is_addressed_with_32_bits() {
    let condition = Condition {
        register: Gpr::Rdx,
        comparison: Comparison::Greater,
        value: 0x1_0000_0000,
    };
    let capture = few();
    let member = Member {
        conditions: &[condition],
        vetoed: VETOED,
        part: record(&capture),
    };
    let span = span("55 488b3d10000000 c3");
    let recorder = Recorder::new(&span, &RING, &[member]).unwrap();
    let detour = recorder.place(DETOUR).unwrap();
    assert_eq!(detour.code().len(), recorder.size());
    expect![[r#"
        80040000 pushfq
        80040001 push rax
        80040002 push rcx
        80040003 push rdx
        80040004 push rsi
        80040005 lea eax,[rsp+28h]
        80040009 and eax,0FFFh
        8004000e cmp eax,0FF0h
        80040013 ja 0FFFFFFFF800400F8h
        80040019 mov rdx,[rsp+8]
        8004001e mov rax,100000000h
        80040028 cmp rdx,rax
        8004002b jbe 0FFFFFFFF8004010Fh
        80040031 rdtsc
        80040033 shl rdx,20h
        80040037 lea rsi,[rax+rdx]
        8004003b mov rax,[0FFFFFFFF80100000h]
        80040043 lea rcx,[rax+1]
        80040047 mov rdx,rcx
        8004004a sub rdx,[0FFFFFFFF80100040h]
        80040052 cmp rdx,400h
        80040059 jg 0FFFFFFFF8004011Ah
        8004005f lock cmpxchg [0FFFFFFFF80100000h],rcx
        80040069 jne short 0FFFFFFFF80040043h
        8004006b and eax,3FFh
        80040070 shl eax,6
        80040073 mov [rax-7FEFEFF0h],rsi
        8004007a lea rsi,[rax-7FEFF000h]
        80040081 mov dword ptr [rsi+8],9
        80040088 mov dword ptr [rsi+0Ch],1
        8004008f mov eax,gs:[10000h]
        80040097 mov [rsi+0Eh],ax
        8004009b mov rax,[rsp+20h]
        800400a0 mov [rsi+18h],rax
        800400a4 mov rax,[rsp+10h]
        800400a9 mov [rsi+20h],rax
        800400ad mov [rsi+28h],rdi
        800400b1 mov rax,[rsp+30h]
        800400b6 mov [rsi+30h],rax
        800400ba lea rax,[rcx]
        800400bd mov [rsi],rax
        800400c0 sub rcx,[0FFFFFFFF80100040h]
        800400c8 sub rcx,200h
        800400cf cmp rcx,1
        800400d3 jb short 0FFFFFFFF80040125h
        800400d5 mov al,[rsp+21h]
        800400d9 and al,8
        800400db add al,78h
        800400dd mov ah,[rsp+20h]
        800400e1 sahf
        800400e2 pop rsi
        800400e3 pop rdx
        800400e4 pop rcx
        800400e5 pop rax
        800400e6 lea rsp,[rsp+8]
        800400eb push rbp
        800400ec mov rdi,[0FFFFFFFF81234578h]
        800400f3 jmp 0FFFFFFFF81234568h
        800400f8 mov al,[rsp+21h]
        800400fc and al,8
        800400fe add al,78h
        80040100 mov ah,[rsp+20h]
        80040104 sahf
        80040105 pop rsi
        80040106 pop rdx
        80040107 pop rcx
        80040108 pop rax
        80040109 lea rsp,[rsp+8]
        8004010e int3
        8004010f lock inc qword ptr [0FFFFFFFF80100088h]
        80040118 jmp short 0FFFFFFFF800400D5h
        8004011a lock inc qword ptr [0FFFFFFFF80100080h]
        80040123 jmp short 0FFFFFFFF800400D5h
        80040125 out 5Eh,al
        80040127 jmp short 0FFFFFFFF800400D5h
    "#]]
    .assert_eq(&text(detour.code(), DETOUR));
    let escape = detour.escape().unwrap();
    let offset = usize::try_from(escape.0 - DETOUR.0).unwrap();
    assert_eq!(detour.code()[offset], 0xcc);
    assert_eq!(detour.resume(AT), Some(detour.tail()));
    assert_eq!(
        detour.resume(AT.wrapping_add(1)),
        detour.tail().checked_add(1)
    );
    assert_eq!(detour.resume(AT.wrapping_add(2)), None);
}

#[test]
fn return_code_of_the_kernel_finds_its_instance_by_the_stub() {
    let capture = Capture {
        registers: RegisterSet::from_iter([Gpr::Rax]),
        ..Capture::default()
    };
    let entry = EntryCapture {
        registers: RegisterSet::from_iter([Gpr::Rdi]),
        stack: Vec::new(),
        current: None,
    };
    let exit = Exit {
        source: 9,
        capture: &capture,
        instances: &INSTANCES,
        entry: &entry,
        lost: LOST,
        first_stub: 5,
    };
    let code = ReturnCode::new(&RING, &exit).unwrap();
    let text = text(code.code(), DETOUR);
    let text: Vec<&str> = text
        .lines()
        .filter(|line| !line.ends_with(" int3"))
        .collect();
    expect![[r#"
        80040000 call 0FFFFFFFF80040030h
        80040010 call 0FFFFFFFF80040030h
        80040020 call 0FFFFFFFF80040030h
        80040030 pushfq
        80040031 push rax
        80040032 push rcx
        80040033 push rdx
        80040034 push rsi
        80040035 push rdi
        80040036 mov rsi,[rsp+30h]
        8004003b lea rdx,[0FFFFFFFF80040005h]
        80040042 sub rsi,rdx
        80040045 shl rsi,2
        80040049 lea rsi,[rsi-7FE00000h]
        80040050 mov rax,[rsi+10h]
        80040054 mov [rsp+30h],rax
        80040059 mov qword ptr [rsi+18h],0
        80040061 rdtsc
        80040063 shl rdx,20h
        80040067 lea rdi,[rax+rdx]
        8004006b mov rax,[0FFFFFFFF80100000h]
        80040073 lea rcx,[rax+2]
        80040077 mov rdx,rcx
        8004007a sub rdx,[0FFFFFFFF80100040h]
        80040082 cmp rdx,400h
        80040089 jg 0FFFFFFFF80040182h
        8004008f lock cmpxchg [0FFFFFFFF80100000h],rcx
        80040099 jne short 0FFFFFFFF80040073h
        8004009b and eax,3FFh
        800400a0 shl eax,6
        800400a3 mov [rax-7FEFEFF0h],rdi
        800400aa lea rdi,[rax-7FEFF000h]
        800400b1 mov dword ptr [rdi+8],9
        800400b8 mov dword ptr [rdi+0Ch],2
        800400bf mov rax,[rsp+28h]
        800400c4 mov [rdi+18h],rax
        800400c8 mov rax,[rsp+20h]
        800400cd mov [rdi+20h],rax
        800400d1 mov eax,esi
        800400d3 sub eax,80200000h
        800400d8 shl rax,22h
        800400dc mov rdx,8000050000000000h
        800400e6 add rax,rdx
        800400e9 mov rdx,[rsi+8]
        800400ed shl rdx,18h
        800400f1 shr rdx,18h
        800400f5 add rax,rdx
        800400f8 mov [rdi+28h],rax
        800400fc mov rax,[rsi+10h]
        80040100 mov [rdi+30h],rax
        80040104 mov rax,[rsi+28h]
        80040108 mov [rdi+38h],rax
        8004010c mov rax,[rsi+30h]
        80040110 mov [rdi+40h],rax
        80040114 mov rax,[rsi+38h]
        80040118 mov [rdi+48h],rax
        8004011c lea rax,[rcx-1]
        80040120 mov [rdi],rax
        80040123 sub rcx,[0FFFFFFFF80100040h]
        8004012b sub rcx,200h
        80040132 cmp rcx,2
        80040136 jb short 0FFFFFFFF8004018Dh
        80040138 mov eax,esi
        8004013a sub eax,80200000h
        8004013f mov ecx,eax
        80040141 shr ecx,6
        80040144 mov rax,[0FFFFFFFF801000C0h]
        8004014c mov [rsi],eax
        8004014e mov rdx,rax
        80040151 shr rdx,20h
        80040155 inc edx
        80040157 shl rdx,20h
        8004015b or rdx,rcx
        8004015e lock cmpxchg [0FFFFFFFF801000C0h],rdx
        80040168 jne short 0FFFFFFFF8004014Ch
        8004016a mov al,[rsp+29h]
        8004016e and al,8
        80040170 add al,78h
        80040172 mov ah,[rsp+28h]
        80040176 sahf
        80040177 pop rdi
        80040178 pop rsi
        80040179 pop rdx
        8004017a pop rcx
        8004017b pop rax
        8004017c lea rsp,[rsp+8]
        80040181 ret
        80040182 lock inc qword ptr [0FFFFFFFF80100080h]
        8004018b jmp short 0FFFFFFFF80040138h
        8004018d out 5Eh,al
        8004018f jmp short 0FFFFFFFF80040138h"#]]
    .assert_eq(&text.join("\n"));
}

#[test]
fn only_the_copies_depend_on_where_a_detour_is() {
    let capture = few();
    let member = Member {
        conditions: &[],
        vetoed: VETOED,
        part: record(&capture),
    };
    let recorder = Recorder::new(&span("488b3d10000000 c3"), &RING, &[member]).unwrap();
    let one = recorder.place(DETOUR).unwrap();
    let other = recorder.place(DETOUR.wrapping_add(0x123_4567)).unwrap();
    let tail = usize::try_from(one.tail().0 - DETOUR.0).unwrap();
    let differ: Vec<usize> = (0..recorder.size())
        .filter(|index| one.code()[*index] != other.code()[*index])
        .collect();
    assert!(
        differ.iter().all(|index| (tail..tail + 12).contains(index)),
        "{differ:?}"
    );
    assert!(!differ.is_empty());
}

fn refused(ring: &Ring, member: Member<'_>, expected: Expect) {
    let error = Recorder::new(&span("0f1f440000 c3"), ring, &[member]).unwrap_err();
    expected.assert_eq(&error.to_string());
}

#[test]
fn what_generated_code_cannot_do_is_refused() {
    let capture = few();
    let member = Member {
        conditions: &[],
        vetoed: VETOED,
        part: record(&capture),
    };
    let ring = |capacity, watermark| Ring {
        capacity,
        watermark,
        ..RING
    };
    for (capacity, watermark) in [(0, 0), (16, 8), (33, 8), (1 << 25, 8), (64, 0), (64, 64)] {
        let error = Recorder::new(
            &span("0f1f440000 c3"),
            &ring(capacity, watermark),
            &[member],
        );
        assert!(
            matches!(error, Err(BuildError::Ring { .. })),
            "{capacity} {watermark}"
        );
    }
    let far = Ring {
        tail: Gva(0x8000_0000),
        ..RING
    };
    refused(
        &far,
        member,
        expect![
            "the ring's tail at 0x80000000 is not within the upper or lower 2 GiB, where detours reach it"
        ],
    );
    let high = Capture {
        stack: vec![512],
        ..few()
    };
    let word = Member {
        part: record(&high),
        ..member
    };
    refused(
        &RING,
        word,
        expect!["word 512 above the stack pointer lies a page or more away from it"],
    );
    let many = Capture {
        stack: vec![0; 32],
        ..few()
    };
    let words = Member {
        part: record(&many),
        ..member
    };
    refused(
        &RING,
        words,
        expect!["32 words of the stack; at most 31 are possible"],
    );
}

#[test]
fn instances_begin_on_the_free_list() {
    let entry = EntryCapture {
        registers: RegisterSet::default(),
        stack: vec![0, 1],
        current: None,
    };
    let layout = InstanceLayout::new(&entry).unwrap();
    assert_eq!(layout.stride(), 256);
    let (bytes, free) = layout.initial(3);
    assert_eq!((bytes.len(), free), (768, 0));
    let next: Vec<u8> = [0, 256, 512].map(|at| bytes[at]).to_vec();
    assert_eq!(next, [1, 2, 0xff]);
    let instance = layout.read(&bytes[256..]).unwrap();
    assert_eq!((instance.slot, instance.generation), (Gva(0), 0));
    assert_eq!(layout.initial(0), (Vec::new(), 0xffff_ffff));
    assert!(layout.read(&bytes[600..]).is_err());
}

#[test]
fn impossible_numbers_of_instances_are_refused() {
    for (count, first_stub) in [(0, 0), (65537, 0), (1, 1 << 23), (2, (1 << 23) - 1)] {
        let instances = Instances { count, ..INSTANCES };
        let entry = EntryCapture {
            registers: RegisterSet::default(),
            stack: Vec::new(),
            current: None,
        };
        let exit = Exit {
            source: 0,
            capture: &Capture::default(),
            instances: &instances,
            entry: &entry,
            lost: LOST,
            first_stub,
        };
        let result = ReturnCode::new(&RING, &exit);
        assert!(
            matches!(result, Err(BuildError::Instances { .. })),
            "{count} {first_stub}"
        );
    }
}
